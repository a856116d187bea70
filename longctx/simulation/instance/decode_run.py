"""Steps that only decode, all alike, as one event: what a core and its queue come to after any number of them.

While nobody is admitted, ends, or needs a page, each step decodes the same sequences as the step `stage` steps before,
one token later. Once such a period has been seen to repeat, the times of those to come follow from the predictor alone:
so they are computed at once, as arrays, and the core is moved past them in one go. The same floating point operations
are done in the same order as one by one, so both ways give the same times to the last bit.
"""

from collections import deque
from typing import Any

import numpy as np

from longctx.serving.engine.core import Core
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.executor.submit_queue import SubmitQueue
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence, completion_of
from longctx.simulation.instance.virtual_executor import VirtualExecutor
from longctx.simulation.record import Totals

_LEAST = 4  # periods for which computing arrays pays
_ROUNDING = 4e-7  # by which a measured step may differ from its prediction, and still count as equal


class DecodeRuns:
    """Finds runs of steps that only decode.

    Args:
      executor: knows the times of the batches in flight.
      predictor: predicts batches, and says how long they take.
    """

    def __init__(self, core: Core, queue: SubmitQueue, executor: VirtualExecutor, predictor: Predictor) -> None:
        self.core, self.queue, self.executor, self.predictor = core, queue, executor, predictor
        self._is_possible = core.scheduler.plan.context == 1 and core.scheduler.stores is None
        # Of the last steps: their numbers, and what repeats if they do.
        self._seen: deque[tuple[int, object]] = deque(maxlen=core.scheduler.plan.stage)

    def find(self) -> "DecodeRun | None":
        """The run that begins now, when a step has begun; None: the next steps may differ from the last."""
        core, scheduler = self.core, self.core.scheduler
        running, stages = scheduler.running, core.in_flight.in_stages
        if (
            not self._is_possible
            or running.prefilling
            or not running.decoding
            or running.slots.resting
            or (scheduler.waiting and (running.slots.free or scheduler.is_optimistic))
            or scheduler.admission.blocked is not None
            or core.leases
            or not scheduler.chunker.predictor.is_confirmed
            or scheduler.forecast.factor != 1.0
        ):
            self._seen.clear()
            return None
        if not self._repeats() or sum(len(batch.chunks) for batch in stages) != len(running.decoding):
            return None
        batches = (*stages, *core.in_flight)
        if any(batch.blocked for batch in batches) or not all(c.decodes for batch in batches for c in batch.chunks):
            return None
        periods = min(map(self._plain_tokens, running.decoding))
        if periods < _LEAST:
            return None
        run = DecodeRun(self, periods)
        return run if run.is_even else None

    def _repeats(self) -> bool:
        """Whether the step that has begun is like the one `stage` steps before, and all that is in flight too."""
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

    def _plain_tokens(self, sequence: Sequence) -> int:
        """How many tokens a sequence can get before it ends, needs a page, or completes one."""
        size = self.core.scheduler.running.page_size
        left = sequence.prompt_length + sequence.max_tokens - sequence.length
        room = len(sequence.pages) * size - sequence.computed
        if self.core.page_hash is not None:
            room = min(room, size - 1 - completion_of(sequence).num_known % size)
        return min(left, room)

    def seconds(self, rows: int, keys: np.ndarray) -> np.ndarray:
        """Of batches of so many decodes, which attend to so many keys, int64 `[n]`: float64 `[n]`."""

        def one(count: int) -> float:
            return self.predictor.seconds(Work(rows, rows, count))

        found: Any = self.predictor.seconds(Work(rows, rows, keys))  # type: ignore[arg-type]
        # Most predictors are arithmetic, which arrays do as well; any other is asked for each batch.
        is_alike = isinstance(found, np.ndarray) and found.shape == keys.shape
        if is_alike and found[0] == one(int(keys[0])) and found[-1] == one(int(keys[-1])):
            return found
        return np.array([one(count) for count in keys.tolist()])


class DecodeRun:
    """The steps from now on that repeat those before them, for some periods of one step for each stage.

    Slots are numbers of steps, counted from the one after the step that ended last. So the last slot of each period is
    busy, and its step is the last of the period to end.

    Attributes:
      is_even: whether all steps take what is predicted, and none so long that the engine would plan otherwise.
    """

    def __init__(self, runs: DecodeRuns, periods: int) -> None:
        self._runs, self._periods = runs, periods
        core, executor = runs.core, runs.executor
        self._stage, self._last = core.scheduler.plan.stage, core.scheduler.num_steps - 1
        stage, stages = self._stage, core.in_flight.in_stages
        first = next(iter(core.in_flight)).index
        rows = [len(batch.chunks) for batch in stages]  # of the slots before the next period of steps to begin
        since = next(n for n in range(1, stage + 1) if rows[(first - n - self._last - 1) % stage])
        self._origin = first - since + 1  # the number of slot 0
        at = (np.arange(self._origin, self._last + 1 + periods * stage) - self._last - 1) % stage
        self._rows = np.array(rows, np.int64)[at]
        self._groups = [stages[i] for i in at[:stage].tolist()]
        # Keys of slots that have begun, too: those of a stage's last batch, so many periods before or after it.
        numbers = np.arange(self._origin, self._last + 1 + periods * stage)
        keys = np.array([batch.work.decode_keys for batch in stages], np.int64)[at]
        indices = np.array([batch.index for batch in stages], np.int64)[at]
        self._keys = keys + (numbers - indices) // stage * self._rows
        begun = self._last + 1 - self._origin
        pendings = {batch.index: pending for batch, pending in executor.recent}
        self._seconds = np.zeros(len(numbers))
        self._seconds[:begun] = [pendings[number].seconds for number in range(self._origin, self._last + 1)]
        for place in range(stage):
            count = rows[place]
            if count:
                mine = slice(begun + place, None, stage)
                self._seconds[mine] = runs.seconds(count, self._keys[mine])
        # A slot ends when the slowest batch leaves its stage, while it is in the last one itself.
        self._ticks = _sliding_max(self._seconds, stage)
        known = [pendings[number].ready for number in range(self._origin, self._last - stage + 2)]
        self._free = np.add.accumulate(np.concatenate([[executor.free], self._ticks[len(known) :]]))[1:]
        self._finished = np.concatenate([known, self._free])
        self._begin = executor.now
        self.is_even = self._is_even()

    @property
    def finished(self) -> float:
        """When its last step ends."""
        return float(self._finished[self._periods * self._stage - 1])

    def periods_until(self, now: float, included: bool = False) -> int:
        """How many whole periods end before a time, or at this time too."""
        ends = self._finished[self._stage - 1 : self._periods * self._stage : self._stage]
        periods = int(np.searchsorted(ends, now, side="right" if included else "left"))
        # Fewer would leave some of the batches in flight as they are.
        return periods if periods * self._stage > self._last - self._origin else 0

    def apply(self, periods: int, totals: Totals, steps: list[StepMetrics] | None) -> list[float]:
        """Move core and queue past so many periods; the times at which their steps ended.

        Args:
          totals: is added to. steps: is appended to, unless it is None.
        """
        if not periods:
            return []
        count, core = periods * self._stage, self._runs.core
        busy = np.flatnonzero(self._rows[:count])
        ends = self._finished[busy]
        self._add(totals, busy, ends)
        if steps is not None:
            self._add_steps(steps, busy, ends)
        self._move_sequences(periods)
        self._move_batches(periods)
        self._runs.queue.skip(count, float(ends[-1]), lambda number: self._tick(number - self._stage + 1))
        scheduler, chunker = core.scheduler, core.scheduler.chunker
        scheduler.num_steps += count
        chunker.predictor.confirm_decodes(self._ticks[busy].tolist())
        if self._stage > 1:  # else it remembers nothing
            recent, grown = chunker.state()
            chunker.restore(recent, grown - (count - self._stage))
        for batch in core.in_flight.in_stages:
            chunker.note(batch.chunks)
        num_busy = sum(1 for batch in self._groups if batch.chunks)
        core.in_flight.num_idle += count * (self._stage - num_busy)
        core.now = self._runs.executor.now
        core.counts["output_tokens"] += periods * len(scheduler.running.decoding)
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
        predicted = self._ticks[busy]
        self._durations = _gaps(self._begin, self._finished[busy]) * shares.reshape(-1)[busy]
        if np.any(np.abs(self._durations / predicted - 1) > _ROUNDING):
            return False
        seconds = self._seconds[self._rows > 0]
        return self._runs.core.in_flight.is_steady(float(seconds.min()), float(seconds.max()))

    def _tick(self, number: int) -> float:
        """Seconds of the slowest batch while the step of this number is in the last stage."""
        return float(self._ticks[number - self._origin])

    def _add(self, totals: Totals, busy: np.ndarray, ends: np.ndarray) -> None:
        rows, keys = int(self._rows[busy].sum()), int(self._keys[busy].sum())
        totals.steps += len(busy)
        totals.rows += rows
        totals.samples += rows
        totals.pairs += keys
        totals.keys += keys
        totals.decode_pairs += keys
        totals.stage_seconds = _add_up(totals.stage_seconds, self._seconds[busy])
        totals.busy = _add_up(totals.busy, _gaps(self._begin, ends))

    def _add_steps(self, steps: list[StepMetrics], busy: np.ndarray, ends: np.ndarray) -> None:
        rows = [tuple((completion_of(s).request_id, 1, True) for s in batch.sampled) for batch in self._groups]
        last = [[completion_of(s).metrics.last_token or 0.0 for s in batch.sampled] for batch in self._groups]
        for slot, end, seconds in zip(busy.tolist(), ends.tolist(), self._durations.tolist(), strict=False):
            place = slot % self._stage
            gaps = tuple(end - at for at in last[place])
            last[place], tick = [end] * len(gaps), float(self._ticks[slot])
            number, samples, keys = self._origin + slot, len(gaps), int(self._keys[slot])
            alone = (float(self._seconds[slot]),)
            step = StepMetrics(number, end, seconds, True, tick, samples, (), rows[place], (), samples, keys, alone)
            steps.append(step._replace(gaps=gaps))

    def _move_sequences(self, periods: int) -> None:
        count = periods * self._stage
        for place, batch in enumerate(self._groups):
            ends = self._finished[place : count : self._stage]
            longest = float((ends[1:] - ends[:-1]).max()) if periods > 1 else 0.0
            for sequence in batch.sampled:
                sequence.computed += periods
                sequence.length += periods
                sequence.ready += count
                completion = completion_of(sequence)
                completion.num_known += periods
                metrics = completion.metrics
                assert metrics.last_token is not None
                metrics.longest_gap = max(metrics.longest_gap, float(ends[0]) - metrics.last_token, longest)
                metrics.last_token = float(ends[-1])
                metrics.output_tokens += periods
                times = getattr(completion, "times", None)
                if times is not None:
                    times.append(ends)  # of all sequences of a batch the same array

    def _move_batches(self, periods: int) -> None:
        count, core, executor = periods * self._stage, self._runs.core, self._runs.executor
        known = {id(batch): batch for batch in (*core.in_flight.in_stages, *core.in_flight)}
        moved = [(batch, pending) for batch, pending in executor.recent if id(batch) in known]
        executor.recent.clear()
        for batch, pending in moved:
            batch.index += count
            slot = batch.index - self._origin
            batch.admitted, batch.tables = [], []
            if batch.chunks:
                self._move_rows(batch, periods, float(self._seconds[slot]))
                pending.seconds = batch.predicted
            is_last = batch.index + self._stage - 1 <= self._last + count
            pending.ready = float(self._finished[slot]) if is_last else np.inf
            executor.recent.append((batch, pending))
        executor.free, executor.now = float(self._free[count - 1]), float(self._finished[count - 1])

    def _move_rows(self, batch: Batch, periods: int, seconds: float) -> None:
        batch.chunks = [chunk._replace(start=chunk.start + periods) for chunk in batch.chunks]
        batch.work = batch.work._replace(decode_keys=batch.work.decode_keys + periods * len(batch.chunks))
        batch.predicted, batch.rank_seconds = seconds, (seconds,)


def _sliding_max(values: np.ndarray, size: int) -> np.ndarray:
    return values if size == 1 else np.lib.stride_tricks.sliding_window_view(values, size).max(axis=1)


def _gaps(begin: float, ends: np.ndarray) -> np.ndarray:
    """Seconds since the end before, or since `begin`."""
    gaps = ends.copy()
    gaps[0] -= begin
    gaps[1:] -= ends[:-1]
    return gaps


def _add_up(total: float, values: np.ndarray) -> float:
    """The sum, added in order."""
    return float(np.add.accumulate(np.concatenate([[total], values]))[-1])
