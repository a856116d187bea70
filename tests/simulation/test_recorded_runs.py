"""Simulated runs are as recorded."""

import json

import pytest

from tests.simulation.recorded_runs import RUNS, STORED, digest

RECORDED = json.loads(STORED.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_run_is_as_recorded(name: str) -> None:
    assert digest(RUNS[name]()) == RECORDED[name]


def test_every_recorded_run_exists() -> None:
    assert RECORDED.keys() == RUNS.keys()
