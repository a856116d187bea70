"""Events of some requests, as they come: whoever waits for one runs the engine's next step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from longctx.serving.request.output import Event
from longctx.serving.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from longctx.serving.engine.engine import Engine


@dataclass(eq=False)
class Job:
    """A request in the engine: its sequences, which of its completions have not ended, and where its events go."""

    request_id: str
    sequences: list[Sequence]
    events: deque[Event]
    open: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.open = set(range(len(self.sequences)))

    def deliver(self, event: Event) -> None:
        self.events.append(event)
        if event.output is not None:
            self.open.remove(event.index)


class TokenStream(Iterator[Event]):
    """Iterates over the events of its requests. Closing or dropping it cancels those that have not ended."""

    def __init__(self, engine: Engine, jobs: list[Job], events: deque[Event]) -> None:
        self.jobs = jobs
        self._engine, self._events = engine, events
        self._num_open = sum(len(job.sequences) for job in jobs)

    def __next__(self) -> Event:
        while self._num_open > 0:
            with contextlib.suppress(IndexError):
                event = self._events.popleft()
                self._num_open -= event.output is not None
                return event
            self._engine.advance(self._events)
        raise StopIteration

    def close(self) -> None:
        """End what has not ended; there are no more events then."""
        if self._num_open > 0:
            self._num_open = 0
            for job in self.jobs:
                self._engine.cancel_job(job)

    def __del__(self) -> None:
        if self._num_open > 0:
            self._engine.abandon(self.jobs)
