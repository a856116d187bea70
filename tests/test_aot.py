"""Runs `tests/aot`, which compiles for H100 without having one, in a process that loads the CUDA plugin.

With the plugin installed, JAX looks for a driver, so it is outside the environment of other tests (see Makefile).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cuda_tools

TESTS = Path(__file__).parent
# Their names do not begin with test_, so that pytest does not collect them here.
FILES = sorted((TESTS / "aot").glob("*.py"))


def compile_for_h100(paths: list[Path], marks: str, assemblers: str) -> None:
    plugin = Path(sys.prefix) / "aot"
    assert plugin.is_dir(), "the CUDA plugin is missing: `make .venv/installed-aot` fetches it"
    assert not cuda_tools.missing(), "ptxas is missing: `make .venv/installed-ptxas` fetches it"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(plugin), "LONGCTX_TEST_PROGRAMS": "", "XLA_FLAGS": ""}
    own["LONGCTX_TEST_ASSEMBLERS"] = assemblers
    # XLA compiles with the first ptxas of the path. What it then generates the other one reads too.
    path = os.pathsep.join([str(cuda_tools.ptxas(cuda_tools.OLDEST).parent), os.environ["PATH"]])
    environment = os.environ | own | {"PATH": path}
    command = [sys.executable, "-m", "pytest", *options, *paths]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_programs_compile_for_h100() -> None:
    """In one process, as each takes seconds to load the plugin, and with the oldest ptxas."""
    compile_for_h100(FILES, "not slow", "oldest")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in FILES if "mark.slow" in path.read_text()], ids=lambda path: path.stem
)
def test_slow_programs_compile_for_h100(path: Path) -> None:
    """They include every named shape; kernels are assembled by both versions of ptxas, those of the quick run too."""
    compile_for_h100([path], "slow or not slow", "all")
