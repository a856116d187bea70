"""Runs `tests/aot`, which compiles for H100 without having one, in processes that load the CUDA plugin.

With the plugin installed, JAX looks for a driver, so it is outside the environment of other tests (see Makefile).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Their names do not begin with test_, so that pytest does not collect them here.
FILES = sorted((TESTS / "aot").glob("*.py"))


def compile_for_h100(path: Path, marks: str) -> None:
    plugin = Path(sys.prefix) / "aot"
    assert plugin.is_dir(), "the CUDA plugin is missing: `make .venv/installed-aot` fetches it"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks, str(path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(plugin), "LONGCTX_TEST_PROGRAMS": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_programs_compile_for_h100(path: Path) -> None:
    compile_for_h100(path, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in FILES if "mark.slow" in path.read_text()], ids=lambda path: path.stem
)
def test_slow_programs_compile_for_h100(path: Path) -> None:
    """They include every named shape."""
    compile_for_h100(path, "slow")
