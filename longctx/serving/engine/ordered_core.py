"""A core that does what another one did: a follower's and a replay's."""

from collections.abc import Callable, Iterable

from longctx.serving.distributed.orders import Arrival, Evict, Forget, Located, Pin, Release, RequestUpdate
from longctx.serving.engine.core import Core
from longctx.serving.engine.run_step import DecisionLog, run_step
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.request.output import Event
from longctx.serving.scheduler.sequence import Sequence


class OrderedCore:
    """Drives a core by what it is told. It checks no request: whoever took it has.

    Args:
      make: makes the sequences of a request that arrives.
      logs: hear of the decisions.

    Attributes:
      open: the sequences of requests that have not ended, by their ids.
    """

    def __init__(
        self,
        core: Core,
        queue: SubmitQueue,
        make: Callable[[Arrival], list[Sequence]],
        logs: Iterable[DecisionLog],
    ) -> None:
        self.core, self.queue = core, queue
        self._make, self._logs = make, tuple(logs)
        self.open: dict[str, list[Sequence]] = {}
        self._ended: dict[str, int] = {}  # completions that have, of these requests

    def hear(self, news: RequestUpdate) -> list[Event]:
        """Let a request enter or end, or a load end."""
        if isinstance(news, Loaded):
            self.core.end_load(news)
            return []
        if isinstance(news, Arrival):
            sequences = self._make(news)
            for sequence in sequences:
                sequence.available = news.available
            self.open[news.request_id] = sequences
            if news.handoff is None:
                self.core.add(sequences)
                return []
            events = self.core.resume(sequences, news.handoff, news.resumed)
            self._note(events)
            return events
        if isinstance(news, Release):
            self.core.leases.release(news.lease_id)
            return []
        if isinstance(news, Forget):
            self.core.forget(news.keys)
            return []
        if isinstance(news, Evict) and news.tier == "device":
            keys = frozenset(news.keys)
            self.core.pool.evict(lambda key: key in keys)
        if isinstance(news, Pin | Evict | Located):
            return []  # it is for tiers and transfers alone
        events = []
        for sequence in self.open[news.request_id]:
            events += self.core.cancel(sequence) if news.lease is None else self.core.hand_off(sequence, news.lease)
        self._note(events)
        return events

    def step(self, now: float) -> EndedStep | None:
        """See `run_step`."""
        return run_step(self.core, self.queue, now, self._logs)

    def end(self, step: EndedStep, now: float, seconds: float | None) -> list[Event]:
        """See `Core.end`."""
        events = self.core.end(step.batch, step.results, now, seconds)
        self._note(events)
        return events

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if event.output is not None:
                ended = self._ended.get(event.request_id, 0) + 1
                self._ended[event.request_id] = ended
                if ended == len(self.open[event.request_id]):
                    del self.open[event.request_id], self._ended[event.request_id]
