"""Whichever barrier operation is deleted or doubled, the Mosaic GPU kernel fails, races or hangs in the interpreter."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from mutants import CHANGES, mutate

# Each takes a minute, or hangs until its time is over.
pytestmark = pytest.mark.slow

SITES = [(change, number) for change in CHANGES for number in range(len(mutate(change, -1)[1]))]


def outcome(change: str, number: int, timeout: float) -> str:
    command = [sys.executable, str(Path(__file__).parent / "mutants.py"), change, str(number)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "hangs"
    return "passes" if result.returncode == 0 else "fails"


@pytest.fixture(scope="module")
def patience() -> float:
    """Seconds after which a changed kernel hangs: several times what the unchanged one takes, which passes."""
    start = time.monotonic()
    assert outcome("none", 0, 600) == "passes"
    return 30 + 3 * (time.monotonic() - start)


@pytest.mark.parametrize(("change", "number"), SITES)
def test_a_changed_barrier_operation_is_noticed(change: str, number: int, patience: float) -> None:
    assert outcome(change, number, patience) != "passes"
