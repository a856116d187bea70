"""Programs that answer HTTP in processes of their own, such as `longctx serve`, for benchmarks and tests."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

COMMAND = [sys.executable, "-c", "from longctx.cli import program; program()"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """Seconds of processors that a process has used, by Linux's clock of it: `/proc` counts by ticks of 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)


class Process:
    """A program that answers HTTP. It can be killed and started again, at the same address; ready in a `with`.

    Args:
      command: with `{port}` where its port stands.
      log: where what it writes goes.
      core: the only one that it may run on; None: all.
      ready: the path that answers 200 when it is ready.
      environment: what it has beside this process's variables.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        core: int | None = None,
        ready: str = "/ready",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.port, self.core, self._ready, self._log = name, free_port(), core, ready, log
        self.url, self._environment = f"http://127.0.0.1:{self.port}", os.environ | dict(environment or {})
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        self._command = [*pinned, *(word.replace("{port}", str(self.port)) for word in command)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def memory(self) -> float:
        """MiB of memory that the process has now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)

    def wait_until_ready(self, seconds: float = 400.0) -> None:
        """RuntimeError if it ends, or is not ready in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.is_alive:
                raise RuntimeError(f"{self.name} has ended before it was ready: {self.tail()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}{self._ready}", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} was not ready within {seconds:g} s: {self.tail()}")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self, seconds: float = 10.0) -> int:
        """SIGTERM, and SIGKILL after so many seconds; the exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        return self._process.returncode

    def tail(self, characters: int = 2_000) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))[-characters:]

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=10).json()

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_alive:
            self.stop()


def serve_command(*flags: str) -> list[str]:
    return [*COMMAND, "serve", "--quiet", "--port", "{port}", *flags]


@contextlib.contextmanager
def serve(*flags: str, core: int | None = None) -> Iterator[Process]:
    """Run `longctx serve` with such flags; ready inside.

    Raises:
      RuntimeError: it has ended, or is not ready in time; or it did not exit with 0 after SIGTERM.
    """
    with Process("longctx serve", serve_command(*flags), Path(os.devnull), core) as process:
        yield process
        if status := process.stop(60):
            raise RuntimeError(f"longctx serve exited with {status} after SIGTERM")
