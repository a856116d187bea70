"""If any one barrier operation is deleted, the Mosaic GPU kernels fail, race or hang in the interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MODULES, mutate

# Each takes half a minute, or hangs until its time is over.
pytestmark = pytest.mark.slow

SITES = [(name, number) for name in MODULES for number in range(len(mutate(name, -1)[1]))]


def outcome(name: str, number: int, timeout: float) -> str:
    command = [sys.executable, str(Path(__file__).parent / "mutants.py"), name, str(number)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "hangs"
    return "passes" if result.returncode == 0 else "fails"


def test_unchanged_kernels_pass() -> None:
    assert outcome("none", 0, 300) == "passes"


@pytest.mark.parametrize(("name", "number"), SITES)
def test_a_missing_barrier_operation_is_noticed(name: str, number: int) -> None:
    assert outcome(name, number, 90) != "passes"
