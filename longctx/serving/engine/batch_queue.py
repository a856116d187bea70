"""Batches that have begun and whose results are not there yet: how far ahead they run, and how long they take."""

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.executor.executor import Executor, Results
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.scheduler import Scheduler

# Planning ahead hides some hundred microseconds. For longer than these seconds it isn't worth what an arrival waits.
_AHEAD = 0.05


class _Begun(NamedTuple):
    batch: Batch
    pending: Any
    at: float


class BatchQueue:
    """Plans steps, begins them and waits for them, in order.

    In a pipeline of S stages a batch is in the last one S - 1 steps after it began; if nothing else is to be computed
    until then, those steps are idle. A step takes as long as the slowest of the batches in the stages.

    Args:
      run_ahead: steps that are planned before the results of the first of them are there, at most.
      note: is called with every batch that is planned, and when.
      monitor: is called with the `StepMetrics` of every step that has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        run_ahead: int,
        note: Callable[[Batch, float], object],
        monitor: Callable[[StepMetrics], object] | None,
    ) -> None:
        self.num_idle = 0  # stages that had nothing to do in a step, summed over steps
        self._scheduler, self._executor, self._clock = scheduler, executor, clock
        self._run_ahead, self._note, self._monitor = run_ahead, note, monitor
        self._stages = scheduler.plan.stage
        self._queue: deque[_Begun] = deque()
        self._in_stages: deque[Batch] = deque(maxlen=self._stages)
        self._idle_since = -math.inf  # when the last step ended
        self._slowest = Work()  # of the step that was waited for last
        self.measured: float | None = None  # seconds that it took, if that is known

    def __bool__(self) -> bool:
        return bool(self._queue)

    def fill(self, now: float) -> None:
        """Plan and begin what can be."""
        self._drop_idle()
        while self._may_run_ahead():
            batch = self._scheduler.schedule(now)
            if batch is None:
                if self._queue or not self._scheduler.is_held_up:
                    break
                batch = self._scheduler.idle()
            self._begin(batch, now)
        self._drop_idle()

    def wait(self, now: float) -> tuple[Batch, Results]:
        """For the results of the oldest batch."""
        while len(self._queue) < self._stages:
            self._begin(self._scheduler.idle(), now)
        last = self._queue[self._stages - 1]  # with whose beginning the oldest batch came into the last stage
        slowest = max(islice(self._queue, self._stages), key=lambda begun: begun.batch.predicted).batch
        oldest = self._queue.popleft()
        before = self._clock()
        results = self._executor.wait(oldest.pending)
        self._slowest = slowest.work
        self._measure(oldest.batch, slowest, last.at, before)
        return oldest.batch, results

    def observe(self, seconds: float | None) -> None:
        """The predictor learns what the step that was waited for last took; None: nobody knows."""
        if seconds is not None:
            predictor: Corrected = self._scheduler.chunker.predictor
            predictor.observe(self._slowest, seconds)

    def _drop_idle(self) -> None:
        """Idle steps have no results."""
        while self._queue and not self._queue[0].batch.chunks:
            self._queue.popleft()

    def _may_run_ahead(self) -> bool:
        later = self._stages - 1  # so many batches are in later stages: the steps in which they began have ended
        if len(self._queue) >= self._run_ahead + later:
            return False
        return sum(begun.batch.predicted for begun in islice(self._queue, later, None)) < _AHEAD

    def _begin(self, batch: Batch, now: float) -> None:
        begun = self._clock()
        self._note(batch, now)
        self._in_stages.append(batch)
        self.num_idle += self._stages - sum(bool(x.chunks) for x in self._in_stages)
        self._queue.append(_Begun(batch, self._executor.submit(batch), begun))

    def _measure(self, batch: Batch, slowest: Batch, begun: float, before: float) -> None:
        """A step has ended, for which we waited from `before` on: the monitor is told."""
        now = self._clock()
        seconds = now - max(begun, self._idle_since)
        self._idle_since = now
        # Nobody knows when it ended if we came late, as when whoever takes the tokens takes their time.
        is_exact = now - before >= seconds / 2
        self.measured = seconds if is_exact else None
        if self._monitor is not None:
            chunks = tuple((chunk.start, chunk.num_tokens) for chunk in batch.chunks if not chunk.decodes)
            decodes = len(batch.chunks) - len(chunks)
            self._monitor(StepMetrics(batch.index, now, seconds, is_exact, slowest.predicted, decodes, chunks))
