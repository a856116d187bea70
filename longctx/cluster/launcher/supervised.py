"""`Supervised`: a process, or several as one, started again when it ends, that ends with this process."""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

logger = logging.getLogger(__name__)

WRONG_INPUT = 2
"""The exit status of a command whose flags or files are wrong: it would fail again."""

_END_SECONDS = 90.0  # for which a process may take to end by itself
_LAST_SECONDS = 10.0  # in which the others say why they end with one of them
_LINES = 20  # of its last output
_LEAST_PAUSE, _MOST_PAUSE = 1.0, 30.0  # seconds
_ALIVE = 60.0  # seconds after which a failure is a first one again


class BackOff:
    """Pauses before a retry: 1 s after a first failure, twice as long after each that follows soon, up to 30 s."""

    def __init__(self) -> None:
        self._next = _LEAST_PAUSE

    def after(self, lived: float) -> float:
        """Return the seconds to wait after a failure of something that lived for `lived` seconds."""
        if lived >= _ALIVE:
            self._next = _LEAST_PAUSE
        seconds, self._next = self._next, min(2 * self._next, _MOST_PAUSE)
        return seconds


class Command(NamedTuple):
    """Command of a process, with more variables of its environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


class Supervised:
    """Commands that run together until they are closed; its methods may be called from any thread.

    When one process ends, all do, and all are started again. Each has a pipe as its standard input, which closes when
    this process ends, however that ends: see `end_with_parent`. Their output goes to standard error here, each line
    with its name.

    Args:
      name: of the process, or of all of them together.
      commands: one for each process.

    Attributes:
      num_starts: how often it was started.
      problem: why it is not started again; None: nothing is wrong.
    """

    def __init__(self, name: str, *commands: Command) -> None:
        self.name, self._commands = name, commands
        self.num_starts = 0
        self.problem: str | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"longctx launcher {name}", daemon=True)

    def start(self) -> None:
        """Start it, and watch it from now on."""
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Id of the first process that runs now; None: none runs."""
        return next(iter(self.pids), None)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run now."""
        return [process.pid for process in self._processes if process.poll() is None]

    def begin_to_end(self) -> None:
        """Ask it to end; it is not started again."""
        with self._lock:
            self._is_closing.set()
            processes = self._processes
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def close(self, seconds: float = _END_SECONDS) -> None:
        """End it, by force if it takes longer than `seconds`."""
        self.begin_to_end()
        self._thread.join(seconds)
        self._kill()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        back_off = BackOff()
        while True:
            began = time.monotonic()
            with self._lock:
                if self._is_closing.is_set():
                    return
                self._begin()
            status = self._follow()
            if self._is_closing.is_set():
                return
            if status == WRONG_INPUT and self.num_starts == 1:
                self.problem = f"{self.name} can't be started: {self._lines[-1] if self._lines else 'no reason given'}"
                logger.error("%s", self.problem)
                return
            pause = back_off.after(time.monotonic() - began)
            _tell(self.name, f"ended with status {status}; it is started again in {pause:.0f} s")
            self._is_closing.wait(pause)

    def _begin(self) -> None:
        self.num_starts += 1
        self._processes = []
        for command in self._commands:
            process = subprocess.Popen(
                command.arguments,
                env=os.environ | command.environment,
                stdin=subprocess.PIPE,  # its end is the end of this process
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
            )
            self._processes.append(process)

    def _follow(self) -> int:
        """Wait until all processes have ended; the exit status of the first to end."""
        ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        names = [self.name, *(f"{self.name}.{i}" for i in range(1, len(self._processes)))]
        threads = [
            threading.Thread(
                target=self._read, args=(name, process, ends), name=f"longctx launcher {name}", daemon=True
            )
            for name, process in zip(names, self._processes, strict=True)
        ]
        for thread in threads:
            thread.start()
        status = ends.get()
        until = time.monotonic() + _LAST_SECONDS
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                if time.monotonic() > until and not self._is_closing.is_set():
                    self._kill()
        return status

    def _read(self, name: str, process: subprocess.Popen[bytes], ends: "queue.SimpleQueue[int]") -> None:
        """Pass on the output of a process until it ends."""
        assert process.stderr is not None
        assert process.stdin is not None
        with process.stderr, process.stdin:
            for line in process.stderr:
                text = line.decode("utf-8", "replace").rstrip()
                self._lines.append(text)
                _tell(name, text)
            ends.put(process.wait())

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()


def _tell(name: str, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"[{name}] {text}\n")
        sys.stderr.flush()


def end_with_parent(seconds: float = 10.0) -> None:
    """Watch standard input, a pipe of the parent process, and end this process when it closes.

    Args:
      seconds: after which this process ends by force, if SIGTERM has not ended it.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="longctx parent", daemon=True).start()
