"""Steps that read the same prompts beside the same decodes, as one event.

While no sequence comes, ends, or begins to decode, a step follows from the one before it by arithmetic: decodes get one
token more, and the chunker sizes the chunks of prompts. So the sizes and times of such steps are found without batches,
queues and events, and without moving the core; then the core is moved past as many of them as have ended. Chunks are
sized by the engine's own `Chunker`, and floating point operations are done in the order in which they would be one by
one, so both ways give the same numbers to the last bit.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from longctx.serving.engine.batch_queue import AHEAD
from longctx.serving.engine.core import Core
from longctx.serving.executor.submit_queue import SubmitQueue
from longctx.serving.predictor.runtime import seconds_of_many
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import State
from longctx.simulation.instance.planned_steps import Decode, Planned, PlannedSteps, set_states, states_of
from longctx.simulation.instance.virtual_executor import Pending, VirtualExecutor

_LEAST, _MOST = 8, 512  # steps that are planned as arrays
_ROUNDING = 4e-7  # by which a measured step may differ from its prediction, and still count as equal


def find_prompt_steps(
    core: Core, queue: SubmitQueue, executor: VirtualExecutor, until: float, least: int
) -> "PromptSteps | None":
    """Return the steps with prompts that end before `until`, or `least` of them; None: the next may be of other kinds.

    It is asked when a step has begun.
    """
    if not _is_even(core):
        return None
    scheduler, stage = core.scheduler, core.scheduler.plan.stage
    batches, ticks = list(core.in_flight), queue.ticks
    first, stop = batches[0].index, scheduler.num_steps
    pendings = {batch.index: pending for batch, pending in executor.recent}
    if (
        len(batches) < stage
        or stop - first != len(batches)
        or any(
            not batch.chunks or batch.blocked or batch.predicted != pendings[batch.index].seconds for batch in batches
        )
        or [tick.number for tick in ticks] != list(range(first + stage - 1, stop))
        or queue.last_end is None
    ):
        return None
    steps = PromptSteps(core, queue, executor, batches, [pendings[batch.index] for batch in batches])
    steps.run(until, least)
    return steps if steps.num_ends else None


def _is_even(core: Core) -> bool:
    """Whether steps have the same prompts and decodes until something comes, ends, or begins to decode."""
    scheduler, pool = core.scheduler, core.pool
    running, predictor = scheduler.running, scheduler.chunker.predictor
    if not running.prefilling or scheduler.plan.context > 1 or scheduler.steps_between_chunks > 1 or core.leases:
        return False
    if scheduler.waiting and (running.slots.free or running.slots.draining or scheduler.is_optimistic):
        return False
    if scheduler.admission.blocked is not None or scheduler.stores is not None or scheduler.loads.dropped:
        return False
    if pool.listener is not None or pool.windows is not None or scheduler.forecast.factor != 1.0:
        return False
    return predictor.is_confirmed and all(
        each.state is State.PREFILLING and not each.claim and each.available <= each.computed
        for each in running.prefilling
    )


class PromptSteps(PlannedSteps):
    """The steps from now on, see `find_prompt_steps`."""

    def __init__(
        self, core: Core, queue: SubmitQueue, executor: VirtualExecutor, batches: List[Batch], pendings: List[Pending]
    ) -> None:
        super().__init__(core, queue, executor, batches, pendings)
        self._find_decodes()
        self._waits = self._find_waits() if core.scheduler.chunker.heeds_targets else []

    def _find_decodes(self) -> None:
        """Find the decodes of each of `stage` steps, and the first step at whose end a sequence ends."""
        stage, begin, scheduler = self._stage, self._begin, self._core.scheduler
        last = {s: batch.index for batch in self._batches for s in batch.sampled if s.is_drained}
        ends, self._drained = [*last.values()], set[int]()
        for sequence in scheduler.running.decoding:
            left = sequence.prompt_length + sequence.max_tokens - sequence.length
            if left:
                first = max(sequence.ready, begin)
                decode = Decode(sequence, first, first + (left - 1) * stage)
                self._groups[first % stage].append(decode)
                self._drained.add(decode.last)
                ends.append(decode.last)
        self._last_drained = -math.inf
        self._first_end = min(ends, default=math.inf)
        self._rows = [len(group) for group in self._groups]
        self._keys = [sum([each.sequence.computed + 1 for each in group]) for group in self._groups]
        self._shortage = self._find_shortage() if scheduler.is_optimistic else math.inf

    def _find_shortage(self) -> float:
        """Return the first step in which a decode may find no page: nothing is promised to it."""
        size, decodes = self._core.scheduler.running.page_size, [each for group in self._groups for each in group]
        taken = Counter[int]()
        for sequence, first, last in decodes:
            visit = len(sequence.pages) * size - sequence.computed
            steps = range(first + visit * self._stage, last + 1, size * self._stage)
            taken.update(steps[sequence.reserved[0] :])
        left = self._core.pool.available(0)
        for step in sorted(taken):
            left -= taken[step]
            if left < 0:
                return step
        return math.inf

    def _find_waits(self) -> list[tuple[float, int, int]]:
        """Return the TPOT targets, the least first, each with the first step that a sequence waits for, and its end."""
        waits = list[tuple[float, int, int]]()
        for sequence in self._core.scheduler.running.decoding:
            if sequence.tpot_target is None:
                continue
            left = sequence.prompt_length + sequence.max_tokens - sequence.length
            ready = max(sequence.ready, self._begin) if left else sequence.ready
            # A token waits for the steps while it is in later stages, but the first one, which is a prompt's.
            is_first = sequence.length <= sequence.prompt_length + 1
            waits.append(
                (sequence.tpot_target, ready if is_first else ready - self._stage + 1, ready + left * self._stage)
            )
        return sorted(waits)

    def _targets(self, step: int) -> List[float]:
        """Return the least TPOT target of the sequences whose tokens wait for a step; empty: there is none."""
        return next(([target] for target, first, stop in self._waits if first <= step < stop), [])

    def run(self, until: float, least: int) -> None:
        """Find the sizes and times of the steps that end before `until`, or of `least` steps."""
        scheduler, in_flight, stage = self._core.scheduler, self._core.in_flight, self._stage
        history, states = scheduler.chunker.history, states_of(self._prompts)
        last_end, before = self._queue.last_end, self._executor.now
        assert last_end is not None
        seconds, ready, first = self._seconds, self._ready, self._first
        next_try = 0
        while True:
            oldest = len(self._ends)
            if oldest >= next_try and len(self._prompts) == 1:
                if self._plan_many(until, least, last_end):
                    last_end = before = self._ends[-1]
                    continue
                is_begun = len(seconds) - len(self._batches) >= stage
                next_try = oldest + (_LEAST if is_begun else stage)
            end, tick = ready[oldest], self._ticks[oldest + stage - 1]
            if (end >= until and oldest >= least) or first + oldest >= self._first_end or not tick:
                break
            duration = end - max(self._at[oldest + stage - 1], last_end)
            if abs(duration / tick - 1) > _ROUNDING or end - before < duration / 2:
                break
            while in_flight.allows(len(seconds) - oldest - 1, seconds[oldest + stage :]):
                if not self._plan(end, len(seconds) - oldest - 1):
                    break
            else:
                last_end = before = end
                self._ends.append(end)
                self._durations.append(duration)
                self._stops.append(first + len(seconds))
                continue
            break
        del self._planned[(self._stops[-1] if self._stops else self._begin) - self._begin :]
        scheduler.chunker.history = history
        set_states(self._prompts, states)

    def _plan_many(self, until: float, least: int, last_end: float) -> int:
        """Plan steps that have as many rows as the last one, with one prompt alone; returns how many of them end."""
        in_flight, chunker, stage = self._core.in_flight, self._core.scheduler.chunker, self._stage
        oldest, begun, prompt, tokens = len(self._ends), len(self._seconds), self._prompts[0], chunker.chunking.tokens
        same = self._planned[-1].work.rows if self._planned else 0
        step, ahead = self._first + begun, in_flight.run_ahead
        # All decodes have been planned once, and none has been planned for the last time just now.
        is_steady = step >= self._begin + stage and step > self._last_drained + stage
        if not same or not is_steady or ahead > 2 or begun - oldest != ahead + stage - 1 or chunker.rule.window:
            return 0
        stop = min(
            self._shortage, self._first_end + 1, min((last for last in self._drained if last >= step), default=math.inf)
        )
        seconds_left = until - last_end
        in_time = math.inf if seconds_left == math.inf else seconds_left / self._ticks[-1] + stage + ahead
        count = int(min((prompt.remaining - 1) // tokens, stop - step, max(in_time, least - oldest), _MOST))
        if count < _LEAST:
            return 0
        places = [(step + i) % stage for i in range(stage)]
        rows = np.array([self._rows[place] for place in places])
        sizes = np.resize(same - rows, count)
        if sizes.min() < 2:
            return 0
        starts = prompt.computed + np.cumsum(sizes) - sizes
        keys, seconds, is_good = np.zeros(count, np.int64), np.zeros(count), np.zeros(count, bool)
        targets = self._targets(step)
        for i, place in enumerate(places):
            decodes, mine, number = self._rows[place], starts[i::stage], len(starts[i::stage])
            seen = keys[i::stage] = self._keys[place] + decodes * np.arange(number)

            @functools.cache
            def seconds_of(length: int, decodes: int = decodes, mine: Any = mine, seen: Any = seen) -> np.ndarray:
                return seconds_of_many(chunker.predictor, Work.of_many(decodes, seen, mine, length), len(mine))

            is_good[i::stage] = chunker.keeps_rows(same, decodes, targets, seconds_of, number)
            seconds[i::stage] = seconds_of(same - decodes)
        ticks = np.array(self._seconds[begun - stage + 1 :] + seconds.tolist())
        if stage > 1:
            ticks = np.lib.stride_tricks.sliding_window_view(ticks, stage).max(axis=1)
        free = np.add.accumulate(np.concatenate([self._free[-1:], ticks]))[1:]
        ends = np.concatenate([self._ready[oldest : begun - stage + 1], free])[:count]
        expected = np.concatenate([self._ticks[oldest + stage - 1 : begun], ticks])[:count]
        durations = ends - np.concatenate([[max(self._at[oldest + stage - 1], last_end)], ends[:-1]])
        is_good &= np.abs(durations / expected - 1) <= _ROUNDING
        if ahead > 1:
            is_good &= np.concatenate([self._seconds[-1:], seconds[:-1]]) < AHEAD
        numbers = np.arange(oldest, oldest + count)
        is_good &= ((ends < until) | (numbers < least)) & (self._first + numbers < self._first_end)
        if not is_good.all():
            count = int(is_good.argmin())
        if not count:
            return 0
        rest, predicted_at = self._core.scheduler.forecast.advance_many(prompt, sizes[:count])
        free = free[:count].tolist()
        recent, grown = chunker.history
        self._ready[begun - stage + 1 :] = free + [math.inf] * (stage - 1)
        self._free += free
        self._ticks += ticks[:count].tolist()
        self._seconds += seconds[:count].tolist()
        self._at += ends[:count].tolist()
        self._ends += ends[:count].tolist()
        self._durations += durations[:count].tolist()
        self._stops += range(step + 1, step + 1 + count)
        due, behind, changes = prompt.due_share, begun - oldest - 1, int(stage > 1)
        for i, (start, size, seen) in enumerate(
            zip(starts[:count].tolist(), sizes[:count].tolist(), keys[:count].tolist(), strict=True)
        ):
            work = Work.of_many(same - size, seen, start, size)
            states = [(start + size, rest[i], predicted_at[i], due)]
            history = recent, grown - changes * (i + 1)
            decodes_of = self._groups[(step + i) % stage]
            self._planned.append(
                Planned(work, decodes_of, [(prompt, start, size)], self._ends[oldest + i], behind, states, history)
            )
        chunker.history = recent, grown - changes * count
        for i, place in enumerate(places):
            self._keys[place] += self._rows[place] * len(range(i, count, stage))
        return count

    def _plan(self, now: float, behind: int) -> bool:
        """Plan a step; False if it is of another kind."""
        scheduler, stage = self._core.scheduler, self._stage
        chunker, step = scheduler.chunker, self._first + len(self._seconds)
        place = step % stage
        if step >= self._shortage:
            return False
        rows, decodes = self._rows[place], self._groups[place]
        budget = chunker.step(self._decode_work(step))
        prompts = [each for each in self._prompts if each.plannable > 0]
        shares = chunker.fill(budget, prompts, now, lambda head: self._targets(step)) if prompts else {}
        if not (shares or rows) or any(share.num_tokens == each.remaining for each, share in shares.items()):
            return False
        chunks = []
        for sequence, share in shares.items():
            count = share.num_tokens
            chunks.append((sequence, sequence.computed, count))
            sequence.computed += count
            scheduler.forecast.advance(sequence, count)
        seconds = budget.seconds
        chunker.note_rows(budget.work.rows)
        self._keys[place] += rows
        if step in self._drained:
            self._last_drained = step
            self._groups[place] = [each for each in decodes if each.last > step]
            self._rows[place] = len(self._groups[place])
            self._keys[place] -= sum(
                [each.sequence.computed + (step - each.first) // stage + 2 for each in decodes if each.last == step]
            )
        self._seconds.append(seconds)
        tick = max(self._seconds[-stage:])
        self._ticks.append(tick)
        self._at.append(now)
        self._free.append(max(now, self._free[-1]) + tick)
        self._ready.append(math.inf)
        self._ready[-stage] = self._free[-1]
        states = states_of(self._prompts)
        self._planned.append(Planned(budget.work, decodes, chunks, now, behind, states, chunker.history))
        return True

    def _decode_work(self, step: int) -> Work:
        """Return the work of the decodes of a step."""
        place, window = step % self._stage, self._core.scheduler.chunker.rule.window
        work = Work(self._rows[place], self._rows[place], self._keys[place])
        if not window:
            return work
        keys = [each.sequence.computed + (step - each.first) // self._stage + 1 for each in self._groups[place]]
        return work._replace(window=window, window_decode_keys=sum([min(count, window) for count in keys]))
