"""Servers of a real cluster that are killed and drained while they serve: `benchmarks.cluster`, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_request_is_answered_once_and_rightly_whoever_is_killed(tmp_path: Path) -> None:
    """A prefill and a decode server, and then the router, get SIGKILL; another server drains."""
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.cluster", "--parts", "failures", "router", "--longest", "2000"]
    command += ["--requests", "40", "--seconds", "40", "--repeats", "1", "--logs", str(tmp_path), "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    failures, router = (json.loads(found.read_text())[part] for part in ("failures", "router"))
    told = [(event["who"], event["what"]) for event in failures["events"]]
    assert ("prefill-1", "killed") in told
    assert ("decode-1", "killed") in told
    assert ("decode-0", "drained") in told
    assert failures["answered"] == router["answered"] == 40
    assert not failures["retried"], failures["failures"]  # clients saw nothing of it
    assert ("router", "ready again") in [(event["who"], event["what"]) for event in router["events"]]
