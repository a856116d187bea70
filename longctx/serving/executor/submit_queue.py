"""Submits batches to an executor, waits for them in order, and measures steps."""

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any, NamedTuple

from longctx.serving.executor.interface import Executor, Results
from longctx.serving.scheduler.batch import Batch


class EndedStep(NamedTuple):
    """A batch, its results, and how long the step took that brought it to its end, by the queue's clock.

    `is_exact`: whether that is known, see `SubmitQueue`. `predicted`: the seconds of the slowest batch in the stages.
    """

    batch: Batch
    results: Results
    finished: float
    duration: float
    is_exact: bool
    predicted: float

    @property
    def seconds(self) -> float | None:
        """Return the seconds that the step took, if they are known."""
        return self.duration if self.is_exact else None


class Tick(NamedTuple):
    """All stages once: begun with the batch of this number, it takes as long as the slowest batch in the stages.

    `behind`: how many batches were in flight when it was submitted.
    """

    number: int
    at: float
    predicted: float
    behind: int


class SubmitQueue:
    """Submits batches to an executor, waits for the oldest, and measures steps.

    A step takes from the end of the step before it, or from its own submission if that is later, to its own end: when
    `wait` returns. Where submitting takes longer than computing, the results are there before `wait` asks for them; a
    step then takes what the host takes for one, as this is how often tokens come. It is unknown how long a step took if

    - more than half of the time was spent neither submitting nor waiting, as when a caller takes its
      time;
    - it may have begun long before the step before it was looked at, whose results were there by then: where it was
      submitted so early that steps since then took more than twice as long as it, in the mean.

    Args:
      stages: of the executor's pipeline: a batch is in the last one when `stages - 1` more have been submitted.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float], stages: int) -> None:
        self._executor, self._clock, self._stages = executor, clock, stages
        self._queue: deque[tuple[Batch, Any]] = deque()
        self._in_stages: deque[Batch] = deque(maxlen=stages)
        self._ticks: deque[Tick] = deque()  # since the last one that was waited for
        self._last_end = -math.inf
        self._was_late = False  # whether the last step may have ended long before `_last_end`
        self._in_calls = 0.0  # seconds in the executor's calls since the last end

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def oldest(self) -> Any:
        """Return the executor's handle of the oldest in-flight batch."""
        return self._queue[0][1]

    @property
    def shape(self) -> tuple[object, ...]:
        """Return what the times of later steps depend on, except the times and numbers of those before."""
        last = self._ticks[-1].number if self._ticks else 0
        return self._was_late, len(self._queue), tuple((last - tick.number, tick.behind) for tick in self._ticks)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        """Those since the last one that was waited for, the oldest first."""
        return tuple(self._ticks)

    @property
    def last_end(self) -> float | None:
        """Time at which the last step ended, by the queue's clock; None: it may have ended long before."""
        return None if self._was_late else self._last_end

    def move_to(
        self, in_flight: List[tuple[Batch, Any]], in_stages: List[Batch], ticks: List[Tick], now: float
    ) -> None:
        """Have these batches in flight, with their handles, and these ticks, since a step that has ended now."""
        self._queue, self._in_stages, self._ticks = deque(in_flight), deque(in_stages, self._stages), deque(ticks)
        self._last_end, self._in_calls = now, 0.0

    def skip(self, steps: int, now: float, predicted: Callable[[int], float]) -> None:
        """Advance as if `steps` more steps had begun and ended in the same pattern, the last one at `now`.

        Args:
          predicted: seconds of the slowest batch in the stages, when the step of a number is in the first.
        """
        ticks = (tick._replace(number=tick.number + steps, at=now) for tick in self._ticks)
        self._ticks = deque(tick._replace(predicted=predicted(tick.number)) for tick in ticks)
        self._last_end = now

    def submit(self, batch: Batch) -> None:
        """Begin a batch. One that computes nothing has no results."""
        begun = self._clock()
        pending = self._executor.submit(batch)
        self._in_stages.append(batch)
        if not self._queue:
            self._ticks.clear()
            self._in_calls = 0.0
        self._in_calls += self._clock() - begun
        predicted = max(each.predicted for each in self._in_stages)
        self._ticks.append(Tick(batch.index, begun, predicted, len(self._queue)))
        if batch.chunks:
            self._queue.append((batch, pending))

    def wait(self) -> EndedStep:
        """Wait for the oldest batch, which is in the last stage.

        Where several ticks have ended since the last wait, as stages were idle, the step took its share of them.
        """
        batch, pending = self._queue.popleft()
        before = self._clock()
        results = self._executor.wait(pending)
        now = self._clock()
        ticks = []
        while self._ticks and self._ticks[0].number < batch.index + self._stages:
            ticks.append(self._ticks.popleft())
        duration = now - max(ticks[0].at, self._last_end)
        earlier = self._last_end - ticks[0].at if self._was_late else 0.0  # it may have begun so much earlier
        is_busy = self._in_calls + now - before >= duration / 2
        is_exact = is_busy and earlier <= 2 * max(1, ticks[0].behind) * duration
        self._was_late = not is_exact or now - before < duration / 2
        self._last_end, self._in_calls = now, 0.0
        predicted = sum(tick.predicted for tick in ticks)
        duration *= ticks[-1].predicted / predicted if predicted else 1 / len(ticks)
        return EndedStep(batch, results, now, duration, is_exact, ticks[-1].predicted)
