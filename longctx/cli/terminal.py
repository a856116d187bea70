"""Output of commands: their text on standard output, everything else on standard error; and Ctrl-C."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

FAILED, WRONG = 1, 2  # exit statuses: of a generation that failed, of an error that the user can correct
INTERRUPTED = 130  # of Ctrl-C: 128 and the number of SIGINT, as shells have it
_LOG_INTERVAL = 30.0  # seconds between lines of progress where there are no bars
_SAME_INTERRUPT = 0.5  # seconds; some programs send SIGINT twice for one Ctrl-C


def report_error(message: str, status: int) -> int:
    """Print an error, a line on standard error, and return the exit status that goes with it."""
    print(f"longctx: {message}", file=sys.stderr)
    return status


class Console:
    """Statistics and progress, on standard error; nothing with `--quiet`."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet

    def note(self, text: str) -> None:
        """Print a line."""
        if not self._is_quiet:
            print(text, file=sys.stderr, flush=True)

    @property
    def has_bars(self) -> bool:
        """Whether progress bars are shown."""
        return not self._is_quiet and sys.stderr.isatty()

    @contextmanager
    def progress(self, desc: str, unit: str, **settings: Any) -> Iterator[Callable[[int, int], None]]:
        """Show a bar, and yield what moves it: a function of what is done and of the total; a log gets lines."""
        shown = time.monotonic()
        with self.bar(desc=desc, unit=unit, **settings) as bar:

            def show(done: int, total: int) -> None:
                nonlocal shown
                now = time.monotonic()
                if not self.has_bars and done < total and now - shown >= _LOG_INTERVAL:
                    shown = now
                    self.note(f"{desc}: {done} of {total} {unit}s")
                bar.total = total
                bar.update(done - bar.n)

            yield show

    def bar(self, **settings: Any) -> "tqdm":
        """A progress bar, which only a terminal shows."""
        from tqdm import tqdm  # not needed for `--help`

        return tqdm(disable=True if self._is_quiet else None, file=sys.stderr, **settings)


def keep_stdout() -> None:
    """Send what libraries write to file descriptor 1, as Gloo does, to standard error; what Python prints stays.

    If standard output is closed, what Python prints goes nowhere.
    """
    ours = sys.stdout
    if ours is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return
    copy, buffering = os.dup(1), 1 if ours.isatty() else -1  # 1: by lines
    with suppress(OSError):  # standard error is closed
        os.dup2(2, 1)
    sys.stdout = open(copy, "w", buffering, encoding=ours.encoding, errors=ours.errors)  # noqa: SIM115


class InterruptWatcher:
    """Makes Ctrl-C end the program at once, even in the midst of a compilation, which Python would wait for.

    A thread does that. Once `leave_to_python` was called, because something is to be written or told to other processes
    at the end, the first Ctrl-C raises KeyboardInterrupt instead, as usual; a second one ends the program at once.
    """

    def __init__(self) -> None:
        self._is_watching = self._are_raised = False
        self._first: float | None = None  # when Ctrl-C was pressed first

    def leave_to_python(self) -> None:
        """Let the first Ctrl-C from now on raise KeyboardInterrupt; call it in the main thread."""
        if self._is_watching:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._are_raised = True

    def begin_anew(self) -> None:
        """Let the next Ctrl-C count as a first one, as the last was acted on."""
        self._first = None

    def watch(self) -> None:
        """Begin, in the main thread of a program; it lasts as long as that."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return  # as in the background of a shell script
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._sender = sender  # which closes when there is no reference to it
        self._is_watching = True
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        threading.Thread(target=self._watch, args=(receiver,), daemon=True).start()

    def _watch(self, numbers: socket.socket) -> None:
        """Read the numbers of signals as they come."""
        while number := numbers.recv(1):
            if number[0] != signal.SIGINT:
                continue
            now = time.monotonic()
            first = self._first = now if self._first is None else self._first
            if not self._are_raised or now - first > _SAME_INTERRUPT:
                os.write(2, b"longctx: interrupted\n")
                os._exit(INTERRUPTED)


interrupts = InterruptWatcher()
"""The watcher of this program."""
