"""`longctx serve` in a process of its own, for benchmarks and tests."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

COMMAND = [sys.executable, "-c", "from longctx.cli import program; program()"]


class ServerProcess(NamedTuple):
    """A server on loopback that is ready."""

    process: subprocess.Popen[str]
    url: str

    @property
    def memory(self) -> float:
        """MiB of memory that the process has now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


def cpu_seconds(pid: int) -> float:
    """Seconds of processors that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(
    *arguments: str, ready_within: float = 300, log: Path | None = None, core: int | None = None
) -> Iterator[ServerProcess]:
    """Run `longctx serve` with such arguments until it is ready; SIGTERM at the end.

    Args:
      log: where its standard error goes; None: nowhere.
      core: the only one that it may run on; None: all.

    Raises:
      RuntimeError: it has ended, or is not ready in time; or it did not exit with 0.
    """
    port = free_port()
    command = [*COMMAND, "serve", "--port", str(port), "--quiet", *arguments]
    errors = subprocess.DEVNULL if log is None else log.open("w")
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True) as process:
        try:
            server = ServerProcess(process, f"http://127.0.0.1:{port}")
            _wait_until_ready(server, ready_within)
            yield server
            process.send_signal(signal.SIGTERM)
            if status := process.wait(60):
                raise RuntimeError(f"longctx serve exited with {status} after SIGTERM")
        finally:
            if process.poll() is None:
                process.kill()


def _wait_until_ready(server: ServerProcess, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (status := server.process.poll()) is not None:
            raise RuntimeError(f"longctx serve exited with {status} before it was ready")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"longctx serve was not ready within {seconds:g} s")
