"""Events of some requests, as they come: whoever waits for one runs the engine's next step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from longctx.serving.engine.jobs import Job
from longctx.serving.request.output import Event

if TYPE_CHECKING:
    from longctx.serving.engine.engine import Engine


class TokenStream(Iterator[Event]):
    """Iterates over the events of its requests. Closing or dropping it cancels those that have not ended."""

    def __init__(self, engine: Engine) -> None:
        self.jobs: list[Job] = []
        self.events: deque[Event] = deque()
        self._engine = engine
        self._is_closed = False

    def __next__(self) -> Event:
        while not self._is_closed:
            is_open = self._is_open  # asked first: another thread may append the last event now
            with contextlib.suppress(IndexError):
                return self.events.popleft()
            if not is_open:
                break
            self._engine.advance(self.events)
        raise StopIteration

    @property
    def _is_open(self) -> bool:
        return any(job.open for job in self.jobs)

    def close(self) -> None:
        """End what has not ended; there are no more events then."""
        self._is_closed = True
        if self._is_open:
            self._engine.cancel_jobs(self.jobs)

    def __del__(self) -> None:
        if self._is_open:
            self._engine.abandon(self.jobs)
