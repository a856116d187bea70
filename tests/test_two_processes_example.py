"""`examples/multi_host/two_processes.sh` as someone runs it who has just installed the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "multi_host" / "two_processes.sh"


def run(script: Path, *arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("LONGCTX", "PORT")}
    command = [shutil.which("sh") or "sh", str(script), *arguments]
    return subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=timeout)


def programs(directory: Path, **sources: str) -> str:
    """A directory of a PATH with these shell programs, and the few others that the script calls."""
    directory.mkdir()
    for name in ("dirname", "sh", "python3"):
        (directory / name).symlink_to(sys.executable if name == "python3" else str(shutil.which(name)))
    for name, source in sources.items():
        (directory / name).write_text(f"#!/bin/sh\n{source}\n")
        (directory / name).chmod(0o755)
    return str(directory)


def test_without_the_program_it_says_how_to_get_it(tmp_path: Path) -> None:
    copy = tmp_path / "examples" / "multi_host" / SCRIPT.name
    copy.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, copy)
    result = run(copy, PATH=programs(tmp_path / "bin"))
    assert result.returncode == 1
    assert result.stderr == (
        f"two_processes.sh: no longctx on the PATH, and no {tmp_path}/.venv/bin/longctx: "
        "run make .venv/installed, or set LONGCTX\n"
    )


def test_both_processes_get_one_free_port_and_their_ids(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", longctx='echo "$*" | { IFS= read -r line; echo "$line"; }')
    lines = run(SCRIPT, "MODEL", "some words", PATH=path).stdout.splitlines()
    ids = sorted(line.rpartition(" ")[2] for line in lines)
    ports = {line.partition("--coordinator 127.0.0.1:")[2].split()[0] for line in lines}
    assert ids == ["0", "1"]
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) < 65536
    assert all(line.startswith("generate --model MODEL --prompt some words ") for line in lines)


def test_process_1_ends_when_process_0_fails(tmp_path: Path) -> None:
    """Its pipes would stay open."""
    source = 'case "$*" in *"--process-id 1") exec python3 -c "import time; time.sleep(1000)" ;; esac; exit 3'
    assert run(SCRIPT, timeout=60, PATH=programs(tmp_path / "bin", longctx=source)).returncode == 3


@pytest.mark.slow
def test_it_answers_with_the_built_in_model() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = run(SCRIPT, PATH=path, PYTHONPATH=str(SCRIPT.parent.parent.parent))
    assert result.returncode == 0, result.stderr
    assert "48213" in result.stdout
