"""A server under load for a minute: `benchmarks.server_load`, with its recording replayed."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_minute_of_load_beside_long_prompts(tmp_path: Path) -> None:
    """Every request is answered once and right, all pages are back, memory is flat, and the recorded load replays."""
    command = [sys.executable, "-m", "benchmarks.server_load", "--minutes", "1", "--loads", "ilrs"]
    done = subprocess.run([*command, "--record", str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every decision is the same" in done.stdout
