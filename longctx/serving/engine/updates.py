"""What is done to an engine between its steps, asked for by any thread."""

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class Updates:
    """Calls that wait for the end of a step. Adding one is safe in a finaliser, in the midst of anything."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[[Any], object], arguments: Iterable[Any]) -> None:
        """Make a call with each of some arguments."""
        self._calls.extend([functools.partial(call, argument) for argument in arguments])

    def run_next(self) -> None:
        """Make the oldest call."""
        self._calls.popleft()()
