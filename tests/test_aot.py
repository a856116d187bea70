"""Runs `tests/aot`, what is compiled for H100 without one, in a process of its own that alone loads the CUDA plugin.

Where the plugin is, JAX looks for a driver unless told not to, so it lies outside of the environment (see Makefile).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Not named test_*, so that nothing else collects them.
FILES = sorted((TESTS / "aot").glob("*.py"))


def compile_for_h100(path: Path, marks: str) -> None:
    plugin = Path(sys.prefix) / "aot"
    assert plugin.is_dir(), "the CUDA plugin is missing: `make .venv/installed-aot` fetches it"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks, str(path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(plugin)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_programs_for_h100(path: Path) -> None:
    compile_for_h100(path, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in FILES if "mark.slow" in path.read_text()], ids=lambda path: path.stem
)
def test_more_programs_for_h100(path: Path) -> None:
    """Every named shape among them."""
    compile_for_h100(path, "slow")
