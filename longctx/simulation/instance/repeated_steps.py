"""Steps that repeat those before them, as one event: their times follow from the predictor alone.

While no sequence is admitted, ends, or needs a page, each step decodes the same sequences as the step `stage` steps
before, one token later. Once such a period has been seen to repeat, the times of those to come are computed at once, as
arrays, and the core is moved past them (`advance`). The same floating point operations are done in the same order
as one by one, so both ways give the same times to the last bit.
"""

from collections import deque

import numpy as np

from longctx.serving.engine.core import Core
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.executor.submit_queue import SubmitQueue
from longctx.serving.predictor.runtime import Predictor, seconds_of_many
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.sequence import completion_of
from longctx.simulation.instance.repeated_decodes import advance, count_repeats, settled_repeats
from longctx.simulation.instance.virtual_executor import TokenlessExecutor
from longctx.simulation.record import Totals

_LEAST = 4  # periods for which computing arrays pays
_ROUNDING = 4e-7  # by which a measured step may differ from its prediction, and still count as equal


class RepetitionFinder:
    """Finder of steps that repeat those before.

    Args:
      executor: knows the times of the batches in flight.
      predictor: predicts batches, and says how long they take.
    """

    def __init__(self, core: Core, queue: SubmitQueue, executor: TokenlessExecutor, predictor: Predictor) -> None:
        self.core, self.queue, self.executor, self.predictor = core, queue, executor, predictor
        # Of the last steps: their numbers, and what repeats if they do.
        self._seen: deque[tuple[int, object]] = deque(maxlen=core.scheduler.plan.stage)

    def find(self) -> "RepeatedSteps | None":
        """Return the repetition that begins now, when a step has begun; None: the next steps may differ."""
        if not self.core.scheduler.only_decodes:
            self._seen.clear()
            return None
        if not self._repeats() or (periods := count_repeats(self.core, not self.executor.has_tokens)) < _LEAST:
            return None
        steps = RepeatedSteps(self, periods)
        return steps if steps.is_even else None

    def _repeats(self) -> bool:
        """Return whether the step that has begun is like the one `stage` steps before, and all in flight too."""
        core, scheduler = self.core, self.core.scheduler
        step, stage = scheduler.num_steps, scheduler.plan.stage
        if stage == 1 and core.in_flight.run_ahead == 1:
            return True  # all others have ended
        in_flight = tuple((step - batch.index, len(batch.chunks)) for batch in core.in_flight)
        groups = tuple(len(batch.chunks) for batch in core.in_flight.in_stages)
        shape = self.queue.shape, in_flight, groups, tuple(scheduler.running.decoding)
        seen = dict(self._seen).get(step - stage)
        self._seen.append((step, shape))
        return seen == shape

    def seconds(self, rows: int, keys: np.ndarray, seen: np.ndarray, window: int) -> np.ndarray:
        """Return the seconds of batches of `rows` decodes that attend to `keys`, int64 `[n]`, as float64 `[n]`.

        In sliding layers they attend to `seen`, int64 `[n]`.
        """
        works = Work(rows, rows, keys, window=window, window_decode_keys=seen)  # type: ignore[arg-type]
        return seconds_of_many(self.predictor, works, len(keys))


class RepeatedSteps:
    """The steps from now on that repeat those before them, for some periods of one step for each stage.

    Slots are numbers of steps, counted from the one after the step that ended last. So the last slot of each period is
    busy, and its step is the last of the period to end.

    Attributes:
      is_even: whether all steps take what is predicted, and none so long that the engine would plan otherwise.
    """

    def __init__(self, finder: RepetitionFinder, periods: int) -> None:
        self._finder, self._periods = finder, periods
        core, executor = finder.core, finder.executor
        self._stage, self._last = core.scheduler.plan.stage, core.scheduler.num_steps - 1
        stage, stages = self._stage, core.in_flight.in_stages
        first = next(iter(core.in_flight)).index
        rows = [len(batch.chunks) for batch in stages]  # of the slots before the next period of steps to begin
        since = next(n for n in range(1, stage + 1) if rows[(first - n - self._last - 1) % stage])
        self._origin = first - since + 1  # the number of slot 0
        numbers = np.arange(self._origin, self._last + 1 + periods * stage)
        at = (numbers - self._last - 1) % stage
        self._rows = np.array(rows, np.int64)[at]
        self._groups = [stages[i] for i in at[:stage].tolist()]
        # Keys of slots that have begun, too: those of a stage's last batch, so many periods before or after it.
        keys = np.array([batch.work.decode_keys for batch in stages], np.int64)[at]
        indices = np.array([batch.index for batch in stages], np.int64)[at]
        later = (numbers - indices) // stage
        self._keys, self._seen = keys + later * self._rows, np.zeros_like(keys)
        window = max(batch.work.window for batch in stages)
        if window:
            for place, batch in enumerate(stages):
                starts = [chunk.start for chunk in batch.chunks]
                self._seen[at == place] = _keys_in_window(starts, window, later[at == place])
        begun = self._last + 1 - self._origin
        pendings = {batch.index: pending for batch, pending in executor.recent}
        self._seconds = np.zeros(len(numbers))
        self._seconds[:begun] = [pendings[number].seconds for number in range(self._origin, self._last + 1)]
        for place in range(stage):
            count = rows[place]
            if count:
                mine = slice(begun + place, None, stage)
                self._seconds[mine] = finder.seconds(count, self._keys[mine], self._seen[mine], window)
        # A slot ends when the slowest batch leaves its stage, while it is in the last one itself.
        self._ticks = _sliding_max(self._seconds, stage)
        known = [pendings[number].ready for number in range(self._origin, self._last - stage + 2)]
        self._free = np.add.accumulate(np.concatenate([[executor.free], self._ticks[len(known) :]]))[1:]
        self._finished = np.concatenate([known, self._free])
        self._begin = executor.now
        self.is_even = self._is_even()

    @property
    def finished(self) -> float:
        """Time at which its last step ends."""
        return float(self._finished[self._periods * self._stage - 1])

    def periods_until(self, now: float, included: bool = False) -> int:
        """Return how many whole periods end before a time, or at this time too."""
        ends = self._finished[self._stage - 1 : self._periods * self._stage : self._stage]
        periods = int(np.searchsorted(ends, now, side="right" if included else "left"))
        if not included:
            periods = settled_repeats(self._finder.core, periods)
        # Fewer would leave some of the batches in flight as they are.
        return periods if periods * self._stage > self._last - self._origin else 0

    def apply(self, periods: int, totals: Totals, steps: list[StepMetrics] | None) -> list[float]:
        """Move core, queue and executor past some periods, and return the times at which their steps ended.

        Args:
          totals: is added to.
          steps: is appended to, unless it is None.
        """
        if not periods:
            return []
        finder, stage, origin = self._finder, self._stage, self._origin
        core, count, last = finder.core, periods * stage, self._last + periods * stage
        busy = np.flatnonzero(self._rows[:count])
        ends = self._finished[busy]
        now = float(self._finished[count - 1])
        self._add(totals, busy, ends)
        if steps is not None:
            self._add_steps(steps, busy, ends)
        times = {batch.index: self._finished[place:count:stage] for place, batch in enumerate(self._groups)}
        predicted = self._ticks[busy].tolist()
        advance(core, periods, times, lambda number: float(self._seconds[number - origin]), predicted, now)
        finder.queue.skip(count, now, lambda number: float(self._ticks[number - stage + 1 - origin]))
        finder.executor.advance(
            min(batch.index for batch in (*core.in_flight.in_stages, *core.in_flight)),
            lambda number: float(self._finished[number - origin]) if number + stage - 1 <= last else np.inf,
            now,
            float(self._free[count - 1]),
        )
        return ends.tolist()

    def _is_even(self) -> bool:
        count, stage = self._periods * self._stage, self._stage
        if not self._ticks.all():
            return False
        busy = np.flatnonzero(self._rows[:count])
        ticks = self._ticks[:count].reshape(-1, stage)
        shares, before = np.empty_like(ticks), -1
        for place in np.flatnonzero(self._rows[:stage]).tolist():
            # Where stages idled, a step takes its share of the ticks since the step before it.
            since = ticks[:, before + 1]
            for other in range(before + 2, place + 1):
                since = since + ticks[:, other]
            shares[:, place], before = ticks[:, place] / since, place
        self._durations = _gaps(self._begin, self._finished[busy]) * shares.reshape(-1)[busy]
        if np.any(np.abs(self._durations / self._ticks[busy] - 1) > _ROUNDING):
            return False
        seconds = self._seconds[self._rows > 0]
        return self._finder.core.in_flight.is_steady(float(seconds.min()), float(seconds.max()))

    def _add(self, totals: Totals, busy: np.ndarray, ends: np.ndarray) -> None:
        rows, keys, seen = (int(each[busy].sum()) for each in (self._rows, self._keys, self._seen))
        totals.steps += len(busy)
        totals.rows += rows
        totals.samples += rows
        totals.pairs += keys
        totals.keys += keys
        totals.decode_pairs += keys
        totals.window_pairs += seen
        totals.window_keys += seen
        totals.window_decode_pairs += seen
        totals.stage_seconds = _add_up(totals.stage_seconds, self._seconds[busy])
        totals.busy = _add_up(totals.busy, _gaps(self._begin, ends))

    def _add_steps(self, steps: list[StepMetrics], busy: np.ndarray, ends: np.ndarray) -> None:
        rows = [tuple((completion_of(s).request_id, 1, True) for s in batch.sampled) for batch in self._groups]
        last = [[completion_of(s).metrics.last_token or 0.0 for s in batch.sampled] for batch in self._groups]
        for slot, end, seconds in zip(busy.tolist(), ends.tolist(), self._durations.tolist(), strict=False):
            place = slot % self._stage
            gaps = tuple(end - at for at in last[place])
            last[place], tick = [end] * len(gaps), float(self._ticks[slot])
            alone = (float(self._seconds[slot]),)
            step = StepMetrics(self._origin + slot, end, seconds, True, tick, len(gaps), (), rows[place])
            steps.append(step._replace(rank_seconds=alone, gaps=gaps))


def _keys_in_window(starts: list[int], window: int, later: np.ndarray) -> np.ndarray:
    """Return the keys in the windows of decodes after `starts` tokens, some tokens later: int64, as `later`."""
    left = np.sort(window - 1 - np.array(starts, np.int64))  # tokens until each has a full window
    sums = np.concatenate([np.cumsum(left[::-1])[::-1], [0]])
    full = np.searchsorted(left, later, side="right")
    return len(starts) * window - (sums[full] - (len(starts) - full) * later)


def _sliding_max(values: np.ndarray, size: int) -> np.ndarray:
    return values if size == 1 else np.lib.stride_tricks.sliding_window_view(values, size).max(axis=1)


def _gaps(begin: float, ends: np.ndarray) -> np.ndarray:
    """Return the seconds since the end before, or since `begin`."""
    gaps = ends.copy()
    gaps[0] -= begin
    gaps[1:] -= ends[:-1]
    return gaps


def _add_up(total: float, values: np.ndarray) -> float:
    """Return the sum, added in order."""
    return float(np.add.accumulate(np.concatenate([[total], values]))[-1])
