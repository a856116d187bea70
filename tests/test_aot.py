"""Runs `tests/aot`, what is compiled for H100 without one, in a process of its own that alone loads the CUDA plugin.

Where the plugin is, JAX looks for a driver unless told not to, so it lies outside of the environment (see Makefile).
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_programs_for_h100() -> None:
    plugin = Path(sys.prefix) / "aot"
    assert plugin.is_dir(), "the CUDA plugin is missing: `make .venv/installed-aot` fetches it"
    files = map(str, sorted((TESTS / "aot").glob("*.py")))  # not named test_*, so that nothing else collects them
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(plugin)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
