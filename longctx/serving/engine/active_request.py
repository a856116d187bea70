"""`ActiveRequest`: a request in an engine from its check to its last event, and the registry of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from longctx.models.validation import check_real
from longctx.serving.distributed.orders import Arrival, Cancel, RequestUpdate
from longctx.serving.engine.core import Core
from longctx.serving.engine.input_processor import InputProcessor, SequenceMaker
from longctx.serving.engine.step_lock import StepLock
from longctx.serving.executor.interface import Executor
from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event, Output
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.scheduler.sequence import Sequence, completion_of

Sink = Callable[[list[Event]], object]
"""Is called with the events that a step brought a request. It must not block: the engine waits for it."""


@dataclass(eq=False)
class ActiveRequest:
    """A request in an engine.

    Attributes:
      prepared, arrival, handoff, sources: see `Engine.submit`.
      deliver: is called with each of its events, under the engine's lock.
      request_id: unique; the registry chooses one if the request has none.
      available: leading tokens of its prompt that can be loaded; None: they are looked up when it enters.
      resumed: when its handoff was taken up; None: when it enters.
      has_begun: whether it may enter the core with the next step; pages may have to come first.
      sequences: once it has entered the core.
      outputs: of the completions that have ended, by index.
      sink: where an `EngineThread` sends its events; None: it is not of such a thread.
    """

    prepared: PreparedRequest
    arrival: float
    deliver: Callable[[ActiveRequest, Event], object]
    handoff: Handoff | None = None
    sources: Mapping[str, LeasedSource] = field(default_factory=dict)
    sink: Sink | None = None
    request_id: str = ""
    available: int | None = None
    resumed: float | None = None
    has_begun: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    outputs: dict[int, Output] = field(default_factory=dict)

    @property
    def num_completions(self) -> int:
        return self.prepared.request.sampling.n

    @property
    def tenant(self) -> str:
        return self.prepared.request.tenant

    @property
    def open(self) -> list[int]:
        """The completions that have not ended."""
        return [index for index in range(self.num_completions) if index not in self.outputs]

    @property
    def is_open(self) -> bool:
        return len(self.outputs) < self.num_completions

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that are computed, found in the cache or planned, and all of them."""
        length = len(self.prepared.tokens)
        return min(self.sequences[0].computed, length) if self.sequences else 0, length

    @property
    def num_waiting(self) -> int:
        """Its sequences that have not got a slot yet; those that are preempted later do not count."""
        if not self.sequences:
            return self.num_completions
        if all(completion_of(sequence).metrics.admitted is not None for sequence in self.sequences):
            return 0
        return sum(completion_of(self.sequences[index]).metrics.admitted is None for index in self.open)


class ActiveRequests(dict[str, ActiveRequest]):
    """An engine's requests that have not ended, by id: the one registry, through which they enter and leave its core.

    Threads and signal handlers may claim ids at the same time. Other methods are called between steps.
    """

    def __init__(
        self,
        core: Core,
        input_processor: InputProcessor,
        maker: SequenceMaker,
        executor: Executor,
        look_up: Callable[[list[Sequence]], object] = lambda sequences: None,
        note: Callable[[RequestUpdate, List[Sequence]], object] = lambda update, sequences: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._input_processor, self._maker, self._executor = core, input_processor, maker, executor
        self._look_up, self._note, self._clock = look_up, note, clock
        self._numbers = itertools.count()

    @property
    def have_begun(self) -> bool:
        """Whether one of them waits for no pages."""
        return any(request.has_begun for request in tuple(self.values()))

    def claim(self, requests: List[ActiveRequest]) -> None:
        """Check requests, and register each under its id, or a new one; all or none, and then an error says which."""
        for i, request in enumerate(requests):
            with _naming_prompt(i, len(requests)):
                check_real("arrival", request.arrival, -math.inf, self._clock())
                self._input_processor.check(request.prepared, request.handoff)
                self._core.check(request.prepared)
        given = {request.prepared.request.request_id for request in requests}
        try:
            for i, request in enumerate(requests):
                if request.prepared.request.request_id is None:
                    own = dataclasses.replace(request.prepared.request, request_id=self._choose_id(given))
                    request.prepared = request.prepared._replace(request=own)
                request.request_id = str(request.prepared.request.request_id)
                # One call, so that no other thread comes between the question and the answer.
                if self.setdefault(request.request_id, request) is not request:
                    with _naming_prompt(i, len(requests)):
                        raise ValueError(f"request_id must be unique, and {request.request_id!r} has not ended yet")
        except BaseException:
            for request in requests:
                self.drop(request)
            raise

    def drop(self, request: ActiveRequest) -> bool:
        """Let a request be known no more; whether it was."""
        is_known = self.get(request.request_id) is request
        if is_known:
            del self[request.request_id]
        return is_known

    def enter(self, *requests: ActiveRequest) -> None:
        """Let requests wait for their first step, except those that were cancelled before."""
        for request in requests:
            self._enter(request)

    def _enter(self, request: ActiveRequest) -> None:
        if request.sequences or self.get(request.request_id) is not request:
            return
        prepared, request_id, handoff = request.prepared, request.request_id, request.handoff
        seed = None if handoff is None else handoff.seed
        request.sequences = sequences = self._maker.make(prepared, request_id, request.arrival, seed)
        if request.available is None:
            self._look_up(sequences)
        else:
            for sequence in sequences:
                sequence.available = request.available
        available, now = sequences[0].available, self._clock() if request.resumed is None else request.resumed
        entered = prepared.request, request_id, request.arrival, prepared.tokens, available, handoff, now
        self._note(Arrival(*entered), sequences)
        if handoff is None:
            self._core.add(sequences)
        else:
            self._executor.sources.update(request.sources)
            self.deliver(self._core.resume(sequences, handoff, now))

    def repeat(
        self,
        prepared: PreparedRequest,
        request_id: str,
        arrival: float,
        available: int = 0,
        handoff: Handoff | None = None,
        resumed: float = 0.0,
    ) -> ActiveRequest:
        """Let a request enter as it has entered another core, see `Arrival`."""
        request = ActiveRequest(prepared, arrival, lambda _, event: None, handoff, has_begun=True)
        request.request_id, request.available, request.resumed = request_id, available, resumed
        self[request_id] = request
        self.enter(request)
        return request

    def leave(self, *requests: ActiveRequest) -> None:
        """End what has not ended of requests."""
        for request in requests:
            self._enter(request)
            if self.get(request.request_id) is request:
                for sequence in request.sequences:
                    self.deliver(self._core.cancel(sequence))
                self._note(Cancel(request.request_id, self._clock()), ())

    def deliver(self, events: List[Event]) -> None:
        """Pass events on, and forget requests that have ended with them."""
        for event in events:
            request = self[event.request_id]
            if event.output is not None:
                request.outputs[event.index] = event.output
            request.deliver(request, event)
            if event.output is not None and not request.is_open:
                del self[event.request_id]
                for lease, source in request.sources.items():
                    self._executor.sources.pop(lease, None)
                    source.release()

    def fail(self, error: str) -> None:
        """End all requests: the engine has failed."""
        for request in list(self.values()):
            if not request.sequences:
                request.sequences = self._maker.make(request.prepared, request.request_id, request.arrival)
            for index in request.open:
                self.deliver([self._core.abort(request.sequences[index], error)])

    def _choose_id(self, given: set[str | None]) -> str:
        while True:
            request_id = f"request-{next(self._numbers)}"
            if request_id not in given and request_id not in self:
                return request_id


class TokenStream(Iterator[Event]):
    """Iterator over the events of its requests. Closing or dropping it cancels those that have not ended.

    The thread that waits for an event runs the engine's next step.
    """

    def __init__(
        self,
        take_turn: Callable[[str, deque[Event]], object],
        lock: StepLock,
        leave: Callable[..., object],
    ) -> None:
        self.requests: list[ActiveRequest] = []
        self.events: deque[Event] = deque()
        self._take_turn, self._lock, self._leave = take_turn, lock, leave
        self._is_closed = False

    def __next__(self) -> Event:
        while not self._is_closed:
            is_open = self._is_open  # asked first: another thread may append the last event now
            with contextlib.suppress(IndexError):
                return self.events.popleft()
            if not is_open:
                break
            self._take_turn("next", self.events)
        raise StopIteration

    def outputs(self, progress: Callable[[Event], object] | None = None) -> list[Output]:
        """Run to the end; returns the outputs in the order of requests, and closes the stream whatever happens."""
        try:
            for event in self:
                if progress is not None:
                    progress(event)
        finally:
            self.close()
        return [request.outputs[index] for request in self.requests for index in range(request.num_completions)]

    @property
    def _is_open(self) -> bool:
        return any(request.is_open for request in self.requests)

    def close(self) -> None:
        """End what has not ended; there are no more events then."""
        self._is_closed = True
        if self._is_open:
            self._lock.update(functools.partial(self._leave, *self.requests))

    def __del__(self) -> None:
        if self._is_open:
            self._lock.abandon(functools.partial(self._leave, *self.requests))


def prepare_all(processor: InputProcessor, requests: List[Request]) -> list[PreparedRequest]:
    """Prepare requests; an error names the one that is wrong."""
    prepared = []
    for i, request in enumerate(requests):
        with _naming_prompt(i, len(requests)):
            prepared.append(processor.prepare(request))
    return prepared


@contextlib.contextmanager
def _naming_prompt(i: int, count: int) -> Iterator[None]:
    """Put the name of a prompt before the message of an error, if there are several."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if count == 1:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"prompts[{i}]: {error}") from error
