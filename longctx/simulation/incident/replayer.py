"""`Replayer`: replays a log as it was, and checks that every decision is the same."""

from collections.abc import Iterator
from typing import NamedTuple

from longctx.serving.distributed.digest import DecisionDigest, describe
from longctx.serving.distributed.orders import DecisionLog
from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.predictor.work import Work
from longctx.serving.recording.log import RecordedLog
from longctx.serving.recording.records import Cancelled, Closed, Failed, Step, split_keys
from longctx.serving.request.output import Event
from longctx.serving.scheduler.batch import Batch
from longctx.simulation.incident.rebuilt import Rebuilt


class Moment(NamedTuple):
    """A step that was replayed, or a cancel.

    Attributes:
      number: of the step among those recorded; None: of a cancel.
      plans: what was planned in it.
      ended: the end of its oldest batch.
      work: what the step was measured to take its time for.
    """

    number: int | None
    now: float
    plans: list[Batch]
    ended: EndedStep | None
    events: list[Event]
    work: Work = Work()


class Differs(Exception):
    """A decision was another than the recorded one; the message says which."""


class Replayer(DecisionLog):
    """Replays a log on an engine that is rebuilt from its header.

    Attributes:
      engine: see `Rebuilt`.
      end: how the log ends, in words.
    """

    def __init__(self, log: RecordedLog) -> None:
        self.log, self._decisions = log, DecisionDigest()
        self.engine = Rebuilt(log.header, logs=[self])
        self.end = "ends in the midst of things, as where a process is killed"
        self._plans: list[Batch] = []

    def run(self) -> Iterator[Moment]:
        """Replay step by step.

        Raises:
          Differs: a decision is another one.
          ValueError: the log is damaged.
        """
        number = 0
        for record in self.log.records():
            match record:
                case Step():
                    yield self._step(number, record)
                    number += 1
                case Cancelled():
                    self.engine.contents.new_left.extend(record.left)
                    yield Moment(None, record.now, [], None, self.engine.apply(record))
                case Failed():
                    self.end = f"ends as the engine failed: {record.cause}"
                case Closed():
                    self.end = f"was closed: {record.reason}"
                case _:
                    self.engine.apply(record)

    def _step(self, number: int, record: Step) -> Moment:
        engine, ended = self.engine, record.ended
        self._plans = []
        engine.executor.now, engine.executor.recorded = record.now, ended
        step = engine.step(record.now)
        if self._decisions.digest != record.digest or (step is None) != (ended is None):
            plans = "\n".join(describe(batch) for batch in self._plans) or "  nothing"
            raise Differs(f"step {number} differs: the replay plans\n{plans}")
        if step is None or ended is None:
            return Moment(number, record.now, self._plans, None, [])
        step = step._replace(finished=ended.finished, duration=ended.duration, is_exact=ended.is_exact)
        engine.contents.new_keys.extend(split_keys(ended.keys))
        engine.contents.new_left.extend(ended.left)
        work = engine.core.in_flight.slowest.work
        return Moment(number, record.now, self._plans, step, engine.end(step), work)

    # As a `DecisionLog`.

    def note_plan(self, batch: Batch) -> None:
        self._decisions.add_plan(batch)
        self._plans.append(batch)
