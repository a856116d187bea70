"""A replay of the same arrivals under other settings: what would have happened, by prediction."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from longctx.serving.config import EngineConfig
from longctx.serving.distributed.orders import DecisionLog
from longctx.serving.recording.log import RecordedLog
from longctx.serving.recording.records import Arrived, Cancelled, Closed, LoadEnded, Record, Step
from longctx.serving.request.output import Event, Output
from longctx.serving.scheduler.batch import Batch
from longctx.simulation.incident.baseline import Baseline, decision_of
from longctx.simulation.incident.rebuilt import Rebuilt


class Difference(NamedTuple):
    """The first decision that differs: its number among all, its step and time, and what was decided instead.

    `batch`: None if nothing was planned where something had been.
    """

    number: int
    step: int
    now: float
    batch: Batch | None


class Alternative(DecisionLog):
    """Replays a log with another configuration.

    Until the first decision that differs, steps take what was measured. From then on they take what is predicted, by
    `StepTimes`, and completions end where they did; the scheduler's own predictor goes on from what it had measured.
    What was cancelled before it ended goes on to its max_tokens unless it is cancelled again, at the same time.

    Args:
      predicts_from: the number of a decision that counts as different though it is not: with the recorded settings,
        what is predicted of them.

    Attributes:
      difference: see there; None: there is none.
      outputs: of completions that have ended, by the numbers of their sequences.
    """

    def __init__(
        self,
        log: RecordedLog,
        baseline: Baseline,
        config: EngineConfig,
        num_pages: int,
        predicts_from: int | None = None,
    ) -> None:
        self._log, self._baseline, self._predicts_from = log, baseline, predicts_from
        self.engine = Rebuilt(
            log.header,
            config,
            num_pages,
            contents=baseline.replayer.engine.contents,
            outcomes=baseline.outcomes,
            seconds=self._seconds,
            logs=[self],
        )
        self.difference: Difference | None = None
        self.outputs: dict[int, Output] = {}
        self._wanted = {
            order for order, output in baseline.outputs.items() if output.finish_reason in ("stop", "length", "error")
        }
        self._count, self._step_number, self._now = 0, 0, 0.0

    def run(self) -> None:
        """Replay until all that had ended has ended.

        Raises:
          ValueError: a request has not room in this engine.
        """
        records = self._log.records()
        self._follow(records)
        if self.difference is not None:
            self._go_on(records)

    def _follow(self, records: Iterator[Record]) -> None:
        """Do as recorded, until a decision differs."""
        for record in records:
            if not isinstance(record, Step):
                self._note(self.engine.apply(record))
                continue
            engine, executor, ended = self.engine, self.engine.executor, record.ended
            executor.now, executor.recorded = record.now, ended
            self._now, until = record.now, self._baseline.decisions_until[self._step_number]
            step = engine.step(record.now)
            if self.difference is None and self._count < until:
                self._differ(None)
            if step is not None:
                if executor.recorded is not None and ended is not None:
                    step = step._replace(finished=ended.finished, duration=ended.duration, is_exact=ended.is_exact)
                self._note(engine.end(step))
            if self.difference is not None:
                executor.recorded = None
                return
            self._step_number += 1

    def _go_on(self, records: Iterator[Record]) -> None:
        """Go on in virtual time."""
        engine, executor = self.engine, self.engine.executor
        known = itertools.takewhile(lambda record: not isinstance(record, Closed), records)
        # Loads end as they do here.
        updates = (record for record in known if not isinstance(record, Step | LoadEnded))
        record = next(updates, None)
        while self._wanted:
            while record is not None and (not isinstance(record, Arrived | Cancelled) or record.now <= executor.now):
                self._note(engine.apply(record))
                record = next(updates, None)
            step = engine.step(executor.now)
            for loaded in executor.poll_loads():
                engine.core.end_load(loaded)
            if step is not None:
                self._note(engine.end(step))
                executor.now += self._baseline.host_seconds
            elif isinstance(record, Arrived | Cancelled):
                entry = self._baseline.entry_seconds if isinstance(record, Arrived) else 0.0
                executor.now = max(executor.now, record.now + entry)
            elif record is None:
                return

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if event.output is not None:
                order = self.engine.orders[event.request_id, event.index]
                self.outputs[order] = event.output
                self._wanted.discard(order)

    def _differ(self, batch: Batch | None) -> None:
        self.difference = Difference(self._count, self._step_number, self._now, batch)
        if batch is not None:
            self.engine.executor.recorded = None  # else the step's results, of a batch before it, are those recorded

    def _seconds(self, batch: Batch) -> float:
        measured = self._baseline.durations.get(batch.index) if self.difference is None else None
        return self._baseline.times.seconds(batch.work) if measured is None else measured

    # As a `DecisionLog`.

    def note_plan(self, batch: Batch) -> None:
        if self.difference is None:
            decisions, until = self._baseline.decisions, self._baseline.decisions_until[self._step_number]
            is_asked = self._count == self._predicts_from
            if is_asked or self._count >= until or decisions[self._count] != decision_of(batch):
                self._differ(dataclasses.replace(batch, chunks=list(batch.chunks)))
            else:
                self._count += 1
