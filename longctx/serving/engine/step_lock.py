"""Lock of an engine's steps, updates that wait for the end of a step, and deferral of interrupts."""

import contextlib
import functools
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from types import FrameType
from typing import Any

_LOOKS = 3


class _Visit:
    """Object that lives as long as the frame of a thread that is within a step."""


class StepLock:
    """The lock of an engine's steps. A thread that is within a step can't begin another, as a signal handler might.

    Other calls of the engine don't wait for it: their updates are made at once if no step runs, and else at the end of
    the one that runs.

    Args:
      settle: is called after updates.
      on_failure: is called with the cause when an error ends the engine.

    Attributes:
      error: that ended the engine.
    """

    def __init__(
        self, settle: Callable[[], object] = lambda: None, on_failure: Callable[[str], object] = lambda cause: None
    ) -> None:
        self._settle, self._on_failure = settle, on_failure
        self.error: BaseException | None = None
        self._updates: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        # By thread. An exception that a signal raises may leave an entry behind, but not what it refers to.
        self._visits: dict[int, weakref.ref[_Visit]] = {}

    def _inside(self) -> set[int]:
        """The threads that are within a step."""
        return {thread for thread, visit in list(self._visits.items()) if visit() is not None}

    def _is_abandoned(self, alone: set[int]) -> bool:
        """Whether only this thread is inside, and it is locked: an exception of a signal came before a release.

        A lock that has just been released looks like that once, but not repeatedly.
        """
        return all(self._inside() == alone and self._lock.locked() for _ in range(_LOOKS))

    @contextlib.contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """A context from which this thread can't call `call` and its like again.

        Raises:
          RuntimeError: it did.
        """
        thread = threading.get_ident()
        if thread in self._inside():
            raise RuntimeError(
                f"{call} was called from within another call of the same engine, by a monitor or a signal handler, or "
                "while its executor is lent: only submit, cancel, stats, and close of a stream may be called there (or "
                "an exception that a signal handler raised has left the engine locked)"
            )
        visit = _Visit()
        try:
            self._visits[thread] = weakref.ref(visit)
            yield
        finally:
            self._visits.pop(thread, None)

    @contextlib.contextmanager
    def held(self, interrupts: "Interrupts | None" = None) -> Iterator[None]:
        """Within a turn: wait for other threads' steps, and keep them waiting. A deferred interrupt ends the wait.

        Raises:
          RuntimeError: no thread is left that would end the wait.
        """
        if interrupts is None:
            with self._lock:
                yield
            return
        taken, alone = False, {threading.get_ident()}
        try:
            while not (taken := self._lock.acquire(timeout=0.2)):
                interrupts.check()
                if self._is_abandoned(alone):
                    raise RuntimeError("an exception that a signal handler raised has left the engine locked")
            yield
        finally:
            if taken:
                self._lock.release()

    @contextlib.contextmanager
    def held_if_free(self) -> Iterator[bool]:
        """Whether it could be had at once, and then it is held. No step can begin from within."""
        thread = threading.get_ident()
        if thread in self._inside():
            yield False
            return
        taken, visit = False, _Visit()
        try:
            self._visits[thread] = weakref.ref(visit)
            taken = self._lock.acquire(blocking=False) or self._is_abandoned({thread})
            yield taken
        finally:
            if taken:
                self._lock.release()
            self._visits.pop(thread, None)

    # Updates and failure.

    def abandon(self, call: Callable[..., object], arguments: List[Any]) -> None:
        """Make a call with each argument after the next step. This is safe in a finaliser, in the midst of anything."""
        self._updates.extend([functools.partial(call, argument) for argument in arguments])

    def update(self, call: Callable[..., object], arguments: List[Any] | None = None) -> None:
        """Make a call, with each of some arguments, now or as soon as no step runs."""
        with Interrupts():
            if arguments is None:
                self._updates.append(call)
            else:
                self.abandon(call, arguments)
            self.apply()

    def apply(self) -> None:
        """Make the updates, unless a step runs."""
        with Interrupts(), self.held_if_free() as held:
            if held:
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
        with self.turn("follow"), self.held():
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

    def __enter__(self) -> "Interrupts":
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._is_deferring = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_deferring:
            if signal.getsignal(signal.SIGINT) == self._note:  # otherwise a monitor has set a handler
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self.check()

    @staticmethod
    @contextlib.contextmanager
    def allowed() -> Iterator[None]:
        """A context that lets Ctrl-C raise at once again within one that defers it: for what takes minutes."""
        handler = signal.getsignal(signal.SIGINT)
        deferring = getattr(handler, "__self__", None)
        if not isinstance(deferring, Interrupts) or threading.current_thread() is not threading.main_thread():
            yield
            return
        deferring.check()
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was an interrupt."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True
