"""Lock of an engine's steps, updates that wait for the end of a step, and deferral of interrupts."""

import contextlib
import functools
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

_LOOKS = 3


class _Visit:
    """Lives as long as the frame of a thread that is within a step."""


class StepLock:
    """A lock for steps. A thread that is within a step can't begin another: a signal handler might call anything.

    An engine's other calls don't take it: where they find it taken, they leave their news to who holds it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By thread. An exception that a signal raises may leave an entry behind, but not what it refers to.
        self._visits: dict[int, weakref.ref[_Visit]] = {}

    def _inside(self) -> set[int]:
        """The threads that are within a step."""
        return {thread for thread, visit in list(self._visits.items()) if visit() is not None}

    def _is_abandoned(self, alone: set[int]) -> bool:
        """Whether nobody but this thread is inside, and it is locked: an exception that a signal raised came before a
        release. A lock that has just been released looks like that once, but not again and again."""
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
          RuntimeError: nobody is left who would end the wait.
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


class Interrupts:
    """A context in whose midst Ctrl-C raises no KeyboardInterrupt, but at its end; a second Ctrl-C raises at once.

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
        """A context that lets Ctrl-C raise at once again, whoever defers it now: for what takes minutes."""
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


class Updates:
    """Calls that are made between steps: at once if no step runs, and else at the end of the one that runs.

    Args:
      failing: a context in which an error ends the engine.
      settle: is called after the updates.
      is_alive: whether updates may be made.
    """

    def __init__(
        self,
        lock: StepLock,
        failing: Callable[[], AbstractContextManager[None]],
        settle: Callable[[], object],
        is_alive: Callable[[], bool],
    ) -> None:
        self._lock, self._failing, self._settle, self._is_alive = lock, failing, settle, is_alive
        self._calls: deque[Callable[[], object]] = deque()

    def add(self, call: Callable[..., object], arguments: List[Any]) -> None:
        """Make a call with each argument after the next step. This is safe in a finaliser, in the midst of anything."""
        self._calls.extend([functools.partial(call, argument) for argument in arguments])

    def make(self, call: Callable[..., object], arguments: List[Any] | None = None) -> None:
        """Make a call, with each of some arguments, now or as soon as no step runs."""
        with Interrupts():
            if arguments is None:
                self._calls.append(call)
            else:
                self.add(call, arguments)
            self.apply()

    def apply(self) -> None:
        """Make the calls, unless a step runs."""
        with Interrupts(), self._lock.held_if_free() as held:
            if held:
                self.apply_locked()

    def apply_locked(self) -> None:
        """Make the calls; the lock is held."""
        with self._failing():
            while self._calls and self._is_alive():
                self._calls.popleft()()
            self._settle()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """A context that keeps other threads waiting, whose updates are made at its end."""
        with self._lock.turn("follow"), self._lock.held():
            yield
            self.apply_locked()
        while self._calls and self._is_alive():  # they came since then, and found the lock taken
            self.apply()
