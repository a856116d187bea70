"""Whichever barrier operation is deleted, the Mosaic GPU kernel fails, races or hangs in the interpreter.

The search of `test_mosaic_gpu_schedule` finds the same in the schedule alone; this is about the operations it becomes.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from mutants import mutate

# Each takes half a minute, or hangs until its time is over.
pytestmark = pytest.mark.slow


def outcome(number: int, timeout: float) -> str:
    command = [sys.executable, str(Path(__file__).parent / "mutants.py"), str(number)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "hangs"
    return "passes" if result.returncode == 0 else "fails"


@pytest.fixture(scope="module")
def timeout() -> float:
    """Twice what the unchanged kernels take, so that none is taken to hang because the machine is busy."""
    start = time.monotonic()
    assert outcome(-1, 600) == "passes"
    return max(60, 2 * (time.monotonic() - start))


@pytest.mark.parametrize("number", range(len(mutate(-1)[1])))
def test_a_deleted_barrier_operation_is_noticed(number: int, timeout: float) -> None:
    assert outcome(number, timeout) != "passes"
