"""Steps of a core with an executor, and `OrderedCore`, which repeats what another core did."""

from collections.abc import Callable, Iterable

from longctx.serving.distributed.orders import (
    Arrival,
    Cancel,
    DecisionLog,
    Evict,
    Forget,
    Located,
    Pin,
    Release,
    RequestUpdate,
)
from longctx.serving.engine.core import Core
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.request.output import Event
from longctx.serving.scheduler.sequence import Sequence


def run_step(core: Core, queue: SubmitQueue, now: float, logs: Iterable[DecisionLog] = ()) -> EndedStep | None:
    """Begin what can be and wait for the oldest in-flight batch; None if there is none. `Core.end` takes its results.

    Raises:
      RuntimeError: sequences wait that nothing will ever admit.
    """
    if not begin_steps(core, queue, now, logs):
        return None
    return end_step(queue, logs)


def begin_steps(core: Core, queue: SubmitQueue, now: float, logs: Iterable[DecisionLog] = ()) -> bool:
    """Begin what can be; whether a batch is in flight then.

    Raises:
      RuntimeError: sequences wait that nothing will ever admit.
    """
    while (batch := core.begin(now)) is not None:
        for log in logs:
            log.note_plan(batch)
        queue.submit(batch)
    if not queue and core.is_stuck:
        raise RuntimeError("requests are waiting that are never admitted: this is a bug in the scheduler")
    return bool(queue)


def end_step(queue: SubmitQueue, logs: Iterable[DecisionLog] = ()) -> EndedStep:
    """Wait for the oldest in-flight batch."""
    step = queue.wait()
    for log in logs:
        log.note_draw(step.batch, step.results.tokens)
    return step


class OrderedCore:
    """Driver of a core by updates, whose requests were checked by the engine that took them.

    Args:
      make: makes the sequences of a request that arrives.
      logs: receive the decisions.

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

    def apply(self, update: RequestUpdate) -> list[Event]:
        """Let a request enter or end, a load end, or pages go."""
        match update:
            case Loaded():
                self.core.end_load(update)
            case Arrival():
                sequences = self.open[update.request_id] = self._make(update)
                for sequence in sequences:
                    sequence.available = update.available
                if update.handoff is not None:
                    return self._note(self.core.resume(sequences, update.handoff, update.resumed))
                self.core.add(sequences)
            case Release():
                self.core.leases.release(update.lease_id)
            case Forget():
                self.core.forget(update.keys)
            case Evict(tier="device"):
                keys = frozenset(update.keys)
                self.core.pool.evict(lambda key: key in keys)
            case Pin() | Evict() | Located():
                pass  # it is for tiers and transfers alone
            case Cancel():
                core, lease, events = self.core, update.lease, list[Event]()
                for sequence in self.open[update.request_id]:
                    events += core.cancel(sequence) if lease is None else core.hand_off(sequence, lease)
                return self._note(events)
        return []

    def step(self, now: float) -> EndedStep | None:
        """See `run_step`."""
        return run_step(self.core, self.queue, now, self._logs)

    def end(self, step: EndedStep, now: float, seconds: float | None) -> list[Event]:
        """See `Core.end`."""
        return self._note(self.core.end(step.batch, step.results, now, seconds))

    def _note(self, events: list[Event]) -> list[Event]:
        for event in events:
            if event.output is not None:
                ended = self._ended.get(event.request_id, 0) + 1
                self._ended[event.request_id] = ended
                if ended == len(self.open[event.request_id]):
                    del self.open[event.request_id], self._ended[event.request_id]
        return events
