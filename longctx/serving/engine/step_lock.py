"""Lock of an engine's steps, updates that wait for the end of a step, and deferral of interrupts."""

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType


class StepLock:
    """The lock of an engine's steps, which one thread runs at a time.

    Other calls of the engine do not wait for it: their updates are made at once if no step runs, and else before the
    next one.

    Attributes:
      error: that ended the engine.
    """

    def __init__(self, settle: Callable[[], object], on_failure: Callable[[str], object]) -> None:
        self._settle, self._on_failure = settle, on_failure
        self.error: BaseException | None = None
        self._updates: deque[Callable[[], object]] = deque()
        # A thread that has the lock gets it again, so that a signal handler can't wait for the step that it interrupts.
        self._lock, self._is_taken = threading.RLock(), False

    @contextlib.contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Wait for other threads' steps, and keep them waiting; RuntimeError: this thread is within a step."""
        with self._lock:
            if self._is_taken:
                raise RuntimeError(
                    f"{call} was called from within another call of the same engine, by a monitor or a signal handler, "
                    "or while its executor is lent: only submit, cancel, stats, and close of a stream may be called "
                    "there"
                )
            with self._taking():
                yield

    @contextlib.contextmanager
    def turn_if_free(self) -> Iterator[bool]:
        """Keep other threads' steps waiting if none runs; yields whether that is so."""
        has_lock = self._lock.acquire(blocking=False)
        is_free = has_lock and not self._is_taken
        try:
            with self._taking() if is_free else contextlib.nullcontext():
                yield is_free
        finally:
            if has_lock:
                self._lock.release()

    @contextlib.contextmanager
    def _taking(self) -> Iterator[None]:
        try:
            try:
                self._is_taken = True
                yield
            finally:
                self._is_taken = False
        finally:
            self._is_taken = False  # a second Ctrl-C may have come just before the first of these lines

    # Updates and failure.

    def abandon(self, call: Callable[[], object]) -> None:
        """Make a call before the next step. This is safe in a finaliser, in the midst of anything."""
        self._updates.append(call)

    def update(self, call: Callable[[], object]) -> None:
        """Make a call now or as soon as no step runs."""
        with Interrupts():
            self._updates.append(call)
            self.apply()

    def apply(self) -> None:
        """Make the updates, unless a step runs."""
        with Interrupts(), self.turn_if_free() as is_free:
            if is_free:
                self.apply_locked()

    def apply_locked(self) -> None:
        """Make the updates; the lock is held."""
        with self.failing():
            while self._updates and self.error is None:
                self._updates.popleft()()
            self._settle()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """A context that keeps other threads waiting, whose updates are made at its end."""
        with self.turn("follow"):
            yield
            self.apply_locked()
        while self._updates and self.error is None:  # they came since then, and found the lock taken
            self.apply()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A context in which an error ends the engine, in all processes, and all requests."""
        try:
            yield
        except BaseException as error:
            self.error = error
            self._on_failure(f"{type(error).__name__}: {error}")
            raise

    def check_alive(self) -> None:
        """Raise RuntimeError if the engine has failed."""
        if self.error is not None:
            raise RuntimeError("the engine has failed, and its requests with it") from self.error


class Interrupts:
    """A context that defers the KeyboardInterrupt of Ctrl-C to its end; a second Ctrl-C raises at once.

    Python raises it between any two instructions of the main thread, where an engine might have noted one half of a
    decision. Programs that handle SIGINT themselves are left alone.
    """

    def __init__(self) -> None:
        self._is_deferring = self._is_pending = False

    def __enter__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._is_deferring = True
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        if self._is_deferring:
            if signal.getsignal(signal.SIGINT) == self._note:  # otherwise a monitor has set a handler
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._is_pending:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True
