"""The processes of a run: servers, each on one core, and the routers before them. None outlives the run."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from benchmarks.server_process import COMMAND, free_port

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKIO_WORKER_THREADS": "1"}


class Process:
    """A program that answers HTTP. It can be killed and started again, at the same address.

    Args:
      command: with `{port}` where its port stands.
      core: the only one that it may run on; None: all.
      ready: the path that answers 200 when it is ready.
      log: where what it writes goes.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, core: int | None = None, ready: str = "/ready"
    ) -> None:
        self.name, self.port, self._ready, self._log = name, free_port(), ready, log
        self.url = f"http://127.0.0.1:{self.port}"
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        self._command = [*pinned, *(word.replace("{port}", str(self.port)) for word in command)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self._log.open("ab") as log:
            environment = os.environ | ENVIRONMENT
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

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
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM; SIGKILL after 10 s."""
        if self._process is not None and self.is_alive:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

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
        self.stop()


def serve_command(*flags: str) -> list[str]:
    return [*COMMAND, "serve", "--quiet", "--port", "{port}", *flags]


@contextlib.contextmanager
def started(processes: Sequence[Process]) -> Iterator[None]:
    """All at once, ready inside."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_until_ready()
        yield
    finally:
        for process in processes:
            process.stop()


def metrics(process: Process) -> str:
    return httpx.get(f"{process.url}/metrics", timeout=10).text


def metric(text: str, name: str) -> float:
    """A metric of ours, summed over its labels; 0 if it has no sample."""
    lines = [line for line in text.splitlines() if re.match(rf"longctx:{name}[ {{]", line)]
    return sum(float(line.split()[-1]) for line in lines)
