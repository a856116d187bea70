"""`longctx serve` as a process of its own, for tests that come from outside."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent
START = 180.0  # seconds until it must be ready
END = 20.0  # and gone


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START
    while not is_ready(url):
        assert process.poll() is None
        assert time.monotonic() < end, f"it is not ready after {START} s"
        time.sleep(0.2)


class ServeProcess:
    """A context manager: the server is ready inside, and gone after it."""

    def __init__(self, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        program = "from longctx.cli import program; program()"
        self._command = [sys.executable, "-c", program, "serve", "--port", str(self.port), *flags]

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(self._command, env=environment, stdout=self._log, stderr=self._log)
        end = time.monotonic() + START
        try:
            while not self.is_ready():
                assert self.process.poll() is None, f"it exited with {self.process.returncode}:\n{self.log}"
                assert time.monotonic() < end, f"it is not ready after {START} s:\n{self.log}"
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    @property
    def log(self) -> str:
        """Text that it has written."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def is_ready(self) -> bool:
        return is_ready(self.url)

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Return the JSON answer to a POST of JSON."""
        sent = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), sent)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
