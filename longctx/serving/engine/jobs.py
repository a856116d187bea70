"""Requests in an engine, by their ids, from when they come until they have ended."""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event
from longctx.serving.request.request import PreparedRequest
from longctx.serving.scheduler.sequence import Sequence, State


@dataclass(eq=False)
class Job:
    """A request in the engine: its sequences once it has entered, which of its completions have not ended, and where
    its events go."""

    request_id: str
    prepared: PreparedRequest
    arrival: float
    events: deque[Event]
    handoff: Handoff | None = None  # what another engine has computed of it
    sources: Mapping[str, LeasedSource] = field(default_factory=dict)  # where its pages come from, by lease
    sequences: list[Sequence] = field(default_factory=list)
    open: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.open = set(range(self.prepared.request.sampling.n))

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that are computed, found in the cache or planned, and all of them."""
        length = len(self.prepared.tokens)
        return min(self.sequences[0].computed, length) if self.sequences else 0, length

    @property
    def num_waiting(self) -> float:
        """How many of its sequences wait for a slot; infinite if it has not entered."""
        return sum(sequence.state is State.WAITING for sequence in self.sequences) if self.sequences else math.inf

    def deliver(self, event: Event) -> None:
        self.events.append(event)
        if event.output is not None:
            self.open.remove(event.index)


class Jobs(dict[str, Job]):
    """Requests that have not ended, by id. Threads and signal handlers may claim ids at the same time."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def claim(
        self,
        requests: List[PreparedRequest],
        arrival: float,
        events: deque[Event],
        jobs: list[Job],
        handoff: Handoff | None = None,
        sources: Mapping[str, LeasedSource] | None = None,
    ) -> None:
        """Let each request have its id, or a new one; `jobs` gets them.

        Raises:
          ValueError: an id is taken; none of the requests has its id then.
        """
        given = {prepared.request.request_id for prepared in requests}
        try:
            for i, prepared in enumerate(requests):
                request_id = prepared.request.request_id
                if request_id is None:
                    request_id = self._choose_id(given)
                job = Job(request_id, prepared, arrival, events, handoff, sources or {})
                jobs.append(job)
                # One call, so that nobody comes between the question and the answer.
                if self.setdefault(job.request_id, job) is not job:
                    with naming_prompt(i, len(requests)):
                        raise ValueError(f"request_id must be unique, and {job.request_id!r} has not ended yet")
        except BaseException:
            for job in jobs:
                if self.get(job.request_id) is job:  # the last one may not have it
                    del self[job.request_id]
            jobs.clear()
            raise

    def _choose_id(self, given: set[str | None]) -> str:
        while True:
            request_id = f"request-{next(self._numbers)}"
            if request_id not in given and request_id not in self:
                return request_id


@contextlib.contextmanager
def naming_prompt(i: int, count: int) -> Iterator[None]:
    """Put the name of a prompt before the message of an error, if there are several."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if count == 1:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"prompts[{i}]: {error}") from error
