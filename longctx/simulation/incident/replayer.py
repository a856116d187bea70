"""`Replayer`: replays a log as it was, checks that every decision is the same, and gives its requests back."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from longctx.serving.distributed.digest import DecisionDigest, describe, plan_bytes
from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.kv_cache.prefix import PartialPage
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work
from longctx.serving.recording.reader import RecordedLog
from longctx.serving.recording.records import (
    Arrived,
    Cancelled,
    Cleared,
    Closed,
    Failed,
    Forgotten,
    LoadEnded,
    RecordedRequest,
    Released,
    Snapshot,
    Step,
    request_of,
    split_keys,
)
from longctx.serving.request.output import Event
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.policy import Policy
from longctx.simulation.incident.rebuilt import Rebuilt


class Moment(NamedTuple):
    """A step that was replayed, or a cancel.

    Attributes:
      number: of the step among those recorded; None: of a cancel.
      plans: what was planned in it.
      ended: the end of its oldest batch, which sampled `tokens` if the log is not private.
      work: what the step was measured to take its time for.
    """

    number: int | None
    now: float
    plans: list[Batch]
    ended: EndedStep | None
    events: list[Event]
    work: Work = Work()
    tokens: bytes | None = None


class Differs(Exception):
    """A decision was another than the recorded one; the message says which."""


class Replayer:
    """Replays a log on an engine that is rebuilt from its header.

    Args:
      predictor, policy: see `Rebuilt`.
      planned: is called with every planned batch and the time of its step, before the batch runs.
      begins: is called with the time of every step, before it is planned.

    Attributes:
      engine: see `Rebuilt`.
      end: how the log ends, in words.
    """

    def __init__(
        self,
        log: RecordedLog,
        predictor: Predictor | None = None,
        policy: Policy | None = None,
        planned: Callable[[Batch, float], object] = lambda batch, now: None,
        begins: Callable[[float], object] = lambda now: None,
    ) -> None:
        self.log, self._decisions = log, DecisionDigest()
        self._planned, self._begins = planned, begins
        self.engine = Rebuilt(log.header, predictor=predictor, policy=policy, logs=[self])
        self.end = "ends in the midst of things, as where a process is killed"
        self._plans: list[Batch] = []
        self._now = 0.0

    def run(self) -> Iterator[Moment]:
        """Replay step by step.

        Raises:
          Differs: a decision is another one.
          ValueError: the log is damaged.
        """
        number = 0
        for record in self.log.records():
            match record:
                case Arrived():
                    self.engine.arrive(record)
                case Cancelled():
                    self.engine.contents.new_left.extend(_pages(record.left))
                    events = self.engine.cancel(record)
                    yield Moment(None, record.now, [], None, events)
                case Step():
                    yield self._step(number, record)
                    number += 1
                case Snapshot():
                    self.engine.restore(record)
                    self._decisions = DecisionDigest()
                case Released():
                    self.engine.core.leases.release(record.lease_id)
                case LoadEnded():
                    self.engine.end_load(record)
                case Forgotten():
                    self.engine.core.forget(split_keys(record.keys))
                case Cleared():
                    self.engine.core.pool.clear()
                case Failed():
                    self.end = f"ends as the engine failed: {record.cause}"
                case Closed():
                    self.end = f"was closed: {record.reason}"

    def _step(self, number: int, record: Step) -> Moment:
        engine, ended = self.engine, record.ended
        self._plans, self._now = [], record.now
        engine.executor.now, engine.executor.recorded = record.now, ended
        self._begins(record.now)
        step = engine.step(record.now)
        if self._decisions.raw != record.digest or (step is None) != (ended is None):
            plans = "\n".join(describe(plan_bytes(batch)) for batch in self._plans) or "  nothing"
            raise Differs(f"step {number} differs: the replay plans\n{plans}")
        events: list[Event] = []
        work = Work()
        if step is not None and ended is not None:
            if len(step.results.tokens) != ended.num_sampled:
                raise Differs(
                    f"step {number} differs: the replay samples {len(step.results.tokens)} tokens, and "
                    f"{ended.num_sampled} were recorded"
                )
            step = step._replace(finished=ended.finished, duration=ended.duration, is_exact=ended.is_exact)
            engine.contents.new_keys.extend(split_keys(ended.keys))
            engine.contents.new_left.extend(_pages(ended.left))
            work = engine.core.in_flight.slowest.work
            events = engine.end(step)
        return Moment(number, record.now, self._plans, step, events, work, None if ended is None else ended.tokens)

    # What a core tells of its decisions.

    def note_plan(self, batch: Batch) -> None:
        self._decisions.add_plan(batch)
        self._plans.append(batch)
        self._planned(batch, self._now)

    def note_draw(self, batch: Batch, tokens: object) -> None:
        pass


def _pages(left: tuple[tuple[bytes, int, int] | None, ...]) -> list[PartialPage | None]:
    return [None if page is None else PartialPage(*page) for page in left]


def recorded_requests(
    log: RecordedLog, predictor: Predictor | None = None, policy: Policy | None = None
) -> list[RecordedRequest]:
    """All requests of a log that is not private, in order of arrival.

    Args:
      predictor, policy: see `Rebuilt`.

    Raises:
      Differs: the replay, which says whose tokens they are, decides otherwise than was recorded.
    """
    tokens: dict[int, list[int]] = {}
    for moment in Replayer(log, predictor, policy).run():
        if moment.ended is not None and moment.tokens is not None:
            samples = np.frombuffer(moment.tokens, "<i4").tolist()
            for sequence, token in zip(moment.ended.batch.sampled, samples, strict=True):
                completion = sequence.completion
                assert completion is not None
                # A sequence that has ended may be sampled once more in steps that were in flight.
                mine = tokens.setdefault(sequence.order, [])
                if len(mine) < completion.num_known - completion.num_prompt:
                    mine.append(token)
    requests, order = [], 0
    for record in log.records():
        if isinstance(record, Arrived) and record.content is not None:
            orders = range(order, order + record.num_completions)
            order = orders.stop
            request = request_of(record.content, record.request_id)
            requests.append(RecordedRequest(request, [tokens.get(i, []) for i in orders]))
    return requests
