"""Hosts whose own names stand for loopback addresses, as on Debian: Gloo would give these to the other hosts."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from process_threads import free_port

from longctx.serving.distributed.initialize import loopback_of

PROGRAM = """
import sys
from longctx.serving.distributed import initialize
initialize(sys.argv[1], 2, int(sys.argv[2]), join_timeout=60, group_secret="0123456789abcdef" * 2)
"""


def own_address() -> str:
    """An address of this machine that is no loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def start(name: str, process: int, coordinator: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process on a host of another name, which stands for 127.0.1.1 there."""
    hosts = folder / name
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    setup = f"mount --bind {hosts} /etc/hosts && hostname {name} && exec env JAX_PLATFORMS=cpu " + '"$@"'
    command = ["unshare", "--uts", "--mount", "sh", "-c", setup, "sh", sys.executable, "-c", PROGRAM, coordinator]
    return subprocess.Popen([*command, str(process)], stderr=subprocess.PIPE, text=True)


def test_hosts_that_others_can_not_reach_by_their_names_are_refused_with_advice(tmp_path: Path) -> None:
    try:
        subprocess.run(["unshare", "--uts", "--mount", "mount", "--bind", "/etc/hosts", "/etc/hosts"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to give a process a host name of its own")
    coordinator = f"{own_address()}:{free_port()}"
    processes = [start(name, i, coordinator, tmp_path) for i, name in enumerate(("alpha", "beta"))]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode for process in processes), said
    for text in said:
        assert "alpha for 127.0.1.1 and beta for 127.0.1.1" in text
        assert "in /etc/hosts of each, put the host's own address in the line of its name" in text


def test_what_own_names_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in (("127.0.1.1", "127.0.1.1"), ("::1", "::1"), ("10.0.0.5", None), ("fe80::1%eth0", None)):
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, answer=answer, **more: answer)
        assert loopback_of("host") == expected
