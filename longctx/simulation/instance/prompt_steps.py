"""Steps that read the same prompts beside the same decodes, as one event.

While no sequence comes, ends, or begins to decode, a step follows from the one before it by arithmetic: decodes get one
token more, and the chunker sizes the chunks of prompts. So the sizes and times of such steps are found without batches,
queues and events, and without moving the core; then the core is moved past as many of them as have ended. Chunks are
sized by the engine's own `Chunker`, and floating point operations are done in the order in which they would be one by
one, so both ways give the same numbers to the last bit.
"""

import functools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence as List
from typing import Any, NamedTuple

import numpy as np

from longctx.serving.engine.batch_queue import AHEAD
from longctx.serving.engine.core import Core
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue, Tick
from longctx.serving.predictor.runtime import seconds_of_many
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.sequence import Sequence, State, completion_of
from longctx.simulation.instance.virtual_executor import Pending, VirtualExecutor
from longctx.simulation.record import Totals

_LEAST, _MOST = 8, 512  # steps that are planned as arrays
_ROUNDING = 4e-7  # by which a measured step may differ from its prediction, and still count as equal


class _Decode(NamedTuple):
    """A sequence that decodes: the first step that it is in, and its last."""

    sequence: Sequence
    first: int
    last: int


class _Planned(NamedTuple):
    """A step: its prompts' chunks as (sequence, first token, tokens), and the state of all prompts after it."""

    work: Work
    decodes: List[_Decode]
    chunks: List[tuple[Sequence, int, int]]
    at: float
    behind: int  # batches in flight
    states: List[tuple[int, float, int, float]]
    history: tuple[tuple[int, ...], int]


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


class PromptSteps:
    """The steps from now on, see `find_prompt_steps`.

    Numbers of steps that were in flight at first, and of those that were planned since, count from the oldest of them.
    """

    def __init__(
        self, core: Core, queue: SubmitQueue, executor: VirtualExecutor, batches: List[Batch], pendings: List[Pending]
    ) -> None:
        self._core, self._queue, self._executor = core, queue, executor
        self._batches, self._pendings = batches, pendings
        scheduler = core.scheduler
        self._stage, self._first, self._begin = scheduler.plan.stage, batches[0].index, scheduler.num_steps
        self._prompts = [*scheduler.running.prefilling]
        self._seconds = [batch.predicted for batch in batches]
        self._ready = [pending.ready for pending in pendings]
        self._ticks = [0.0] * (self._stage - 1) + [tick.predicted for tick in queue.ticks]
        self._at = [0.0] * (self._stage - 1) + [tick.at for tick in queue.ticks]
        self._free = [0.0] * (len(batches) - 1) + [executor.free]  # when the tick of each step ends
        self._planned = list[_Planned]()
        self._ends, self._durations = list[float](), list[float]()
        self._stops = list[int]()  # steps that are planned after each end
        self._find_decodes()

    @property
    def num_ends(self) -> int:
        """Steps that end in it."""
        return len(self._ends)

    @property
    def finished(self) -> float:
        """Time at which its last step ends."""
        return self._ends[-1]

    def periods_until(self, now: float, included: bool = False) -> int:
        """Return how many steps end before a time, or at this time too."""
        return bisect_right(self._ends, now) if included else bisect_left(self._ends, now)

    def prefill_seconds(self, now: float) -> list[float]:
        """Return the predicted seconds of the rest of each prompt, as they are after the steps that end before now."""
        count = self.periods_until(now)
        planned = self._stops[count - 1] - self._begin if count else 0
        if not planned:
            return [each.prefill_remaining for each in self._prompts]
        return [state[1] for state in self._planned[planned - 1].states]

    def _find_decodes(self) -> None:
        """Find the decodes of each of `stage` steps, and the first step at whose end a sequence ends."""
        stage, begin, scheduler = self._stage, self._begin, self._core.scheduler
        self._groups: list[list[_Decode]] = [[] for _ in range(stage)]
        last = {s: batch.index for batch in self._batches for s in batch.sampled if s.is_drained}
        ends, self._drained = [*last.values()], set[int]()
        for sequence in scheduler.running.decoding:
            left = sequence.prompt_length + sequence.max_tokens - sequence.length
            if left:
                first = max(sequence.ready, begin)
                decode = _Decode(sequence, first, first + (left - 1) * stage)
                self._groups[first % stage].append(decode)
                self._drained.add(decode.last)
                ends.append(decode.last)
        self._last_drained = -math.inf
        self._first_end = min(ends, default=math.inf)
        self._groups_before = [*self._groups]
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

    def _targets(self, step: int) -> List[float]:
        """Return the least TPOT target of the sequences whose tokens wait for a step; empty: there is none."""
        stop, waiting = step + self._stage, list[float]()
        for sequence in self._core.scheduler.running.decoding:
            target = sequence.tpot_target
            if target is None:
                continue
            ready = sequence.ready if sequence.is_drained else max(sequence.ready, self._begin)
            if ready <= step and not sequence.is_drained:
                # Planned in one of the last `stage` steps, this one included, unless it was drained before.
                left = sequence.prompt_length + sequence.max_tokens - sequence.length
                if step < ready + left * self._stage:
                    waiting.append(target)
            elif step < ready < stop and sequence.length > sequence.prompt_length + 1:
                waiting.append(target)
        return [min(waiting)] if waiting else []

    def run(self, until: float, least: int) -> None:
        """Find the sizes and times of the steps that end before `until`, or of `least` steps."""
        scheduler, in_flight, stage = self._core.scheduler, self._core.in_flight, self._stage
        history, states = scheduler.chunker.history, _states(self._prompts)
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
        _set_states(self._prompts, states)

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
        targets = self._targets(step) if chunker.heeds_targets else []
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
            pairs = size * start + size * (size + 1) // 2
            work = Work(same, same - size, seen, ((start, size),), pairs, start + size)
            states = [(start + size, rest[i], predicted_at[i], due)]
            history = recent, grown - changes * (i + 1)
            decodes_of = self._groups[(step + i) % stage]
            self._planned.append(
                _Planned(work, decodes_of, [(prompt, start, size)], self._ends[oldest + i], behind, states, history)
            )
        chunker.history = recent, grown - changes * count
        for i, place in enumerate(places):
            self._keys[place] += self._rows[place] * len(range(i, count, stage))
        return count

    def _plan(self, now: float, behind: int) -> bool:
        """Plan a step; False if it is of another kind."""
        scheduler, stage = self._core.scheduler, self._stage
        chunker, step, place = scheduler.chunker, self._first + len(self._seconds), 0
        place = step % stage
        if step >= self._shortage:
            return False
        rows, decodes = self._rows[place], self._groups[place]
        budget = chunker.step((), self._decode_work(step))
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
        states = _states(self._prompts)
        self._planned.append(_Planned(budget.work, decodes, chunks, now, behind, states, chunker.history))
        return True

    def _decode_work(self, step: int) -> Work:
        """Return the work of the decodes of a step."""
        place, window = step % self._stage, self._core.scheduler.chunker.rule.window
        work = Work(self._rows[place], self._rows[place], self._keys[place])
        if not window:
            return work
        keys = [each.sequence.computed + (step - each.first) // self._stage + 1 for each in self._groups[place]]
        return work._replace(window=window, window_decode_keys=sum([min(count, window) for count in keys]))

    def apply(self, count: int, totals: Totals, steps: list[StepMetrics] | None) -> list[float]:
        """Move core, queue and executor past the first steps, and return the times at which they ended.

        Args:
          count: of steps.
          totals: is added to.
          steps: is appended to, unless it is None.
        """
        if not count:
            return []
        running = self._core.scheduler.running
        self._computed = {s: s.computed for s in running.decoding}
        self._known = {s: completion_of(s).num_known + s.in_flight for s in running.decoding}
        self._decodes = {each.sequence: each for group in self._groups_before for each in group}
        events, at = sorted(self._page_events(count), key=lambda event: event[:4]), 0
        events.append((count, 0, 0, 0, None))
        step, run = self._begin, list[tuple[Sequence, int, int]]()
        for number, end in enumerate(self._ends[:count]):
            if number < len(self._batches) or events[at][0] == number:
                self._take_prompt_pages(run)
            self._end_step(number, end, totals, steps)
            # Pages are found and taken in the order in which they would be one by one.
            while events[at][0] == number and not events[at][1]:
                self._receive(events[at])
                at += 1
            while step < self._stops[number]:
                while events[at][0] == number and events[at][2] == step:
                    self._take_prompt_pages(run)
                    self._take_page(events[at])
                    at += 1
                for chunk in self._planned[step - self._begin].chunks:
                    if run and run[-1][0] is not chunk[0]:
                        self._take_prompt_pages(run)
                    run.append(chunk)
                step += 1
        self._take_prompt_pages(run)
        self._move_decodes(count)
        self._move_core(count)
        return self._ends[:count]

    def _visits(self, decode: _Decode, stop: int) -> int:
        """Return how many steps before `stop` decode a sequence."""
        return len(range(decode.first, min(stop, decode.last + 1), self._stage))

    def _page_events(self, count: int) -> "list[_PageEvent]":
        """Return when decodes need pages, or get tokens that complete pages which others may find."""
        core, stage, first, size = self._core, self._stage, self._first, self._core.scheduler.running.page_size
        found, stop = list[_PageEvent](), self._stops[count - 1]
        for place, decode in enumerate(self._decodes.values()):
            sequence = decode.sequence
            for visit in range(len(sequence.pages) * size - self._computed[sequence], self._visits(decode, stop), size):
                step = decode.first + visit * stage
                found.append((bisect_right(self._stops, step), 1, step, place, decode))
            if core.page_hash is not None:
                received, full = self._visits(decode, first + count), (-self._known[sequence] - 1) % size
                # A page that is full may be offered with the next token only: its last one was not planned before.
                visits = {0, *range(full, received, size), *range(full + 1, received, size)}
                found += [
                    (decode.first + visit * stage - first, 0, visit, place, decode)
                    for visit in visits
                    if visit < received
                ]
        return found

    def _take_prompt_pages(self, chunks: list[tuple[Sequence, int, int]]) -> None:
        """Take the pages of consecutive chunks of a prompt, offer them for sharing, and clear the list."""
        if not chunks:
            return
        running, pool = self._core.scheduler.running, self._core.pool
        sequence, _, _ = chunks[0]
        first, stop = sequence.registered, (chunks[-1][1] + chunks[-1][2]) // running.page_size
        # All at once, unless the pages of some can be found meanwhile: these may be the next to be overwritten.
        is_new = len(chunks) == 1 or all(pool.find(key) is None for key in sequence.keys[first:stop])
        for _, start, tokens in chunks[-1:] if is_new else chunks:
            sequence.computed = start + tokens
            if sequence.computed > len(sequence.pages) * running.page_size:
                running.extend(sequence, sequence.computed, start)
            if sequence.registered < len(sequence.keys):
                running.register(sequence)
        chunks.clear()

    def _take_page(self, event: "_PageEvent") -> None:
        _, _, step, _, decode = event
        assert decode is not None
        start = self._computed[decode.sequence] + (step - decode.first) // self._stage
        self._core.scheduler.running.extend(decode.sequence, start + 1, start)

    def _receive(self, event: "_PageEvent") -> None:
        """Offer the pages that a token completes, as far as they are planned to be computed."""
        number, _, visit, _, decode = event
        core, page_hash = self._core, self._core.page_hash
        assert decode is not None
        assert page_hash is not None
        sequence, completion = decode.sequence, completion_of(decode.sequence)
        completion.num_known = self._known[sequence] + visit + 1
        if completion.num_known % page_hash.page_size == 0:
            completion.extend_keys(sequence.keys, page_hash)
        if sequence.registered < len(sequence.keys):
            self._set_computed(decode, number)
            core.scheduler.running.register(sequence)

    def _set_computed(self, decode: _Decode, number: int) -> None:
        """Have a sequence computed as many tokens as were planned before a step's end."""
        planned = self._visits(decode, self._stops[number - 1] if number else self._begin)
        decode.sequence.computed = self._computed[decode.sequence] + planned

    def _end_step(self, number: int, end: float, totals: Totals, steps: list[StepMetrics] | None) -> None:
        """Count what a step has computed; those that were in flight at first bring their tokens one by one."""
        before = self._ends[number - 1] if number else self._executor.now
        if number >= len(self._batches):
            planned = self._planned[number - len(self._batches)]
            totals.add(planned.work, self._seconds[number], end - before)
            if steps is not None:
                steps.append(self._metrics(number, planned))
            return
        core, batch = self._core, self._batches[number]
        totals.add(batch.work, self._seconds[number], end - before)
        if steps is not None:
            results, tick = self._executor.results(self._pendings[number]), self._ticks[number + self._stage - 1]
            steps.append(StepMetrics.of(EndedStep(batch, results, end, self._durations[number], True, tick)))
        for sequence in batch.sampled:
            if sequence.state is State.FINISHED:
                continue
            decode = self._decodes.get(sequence)
            if decode is not None:
                self._set_computed(decode, number)
            core.receive(sequence, 0, None, end)
            core.counts["output_tokens"] += 1

    def _metrics(self, number: int, planned: _Planned) -> StepMetrics:
        """Return what a monitor is given of a step that was planned since."""
        end, tick = self._ends[number], self._ticks[number + self._stage - 1]
        ids = [completion_of(each.sequence).request_id for each in planned.decodes]
        rows = [(each, 1, True) for each in ids]
        rows += [(completion_of(each).request_id, tokens, False) for each, _, tokens in planned.chunks]
        chunks = tuple((start, tokens) for _, start, tokens in planned.chunks)
        step = self._first + number
        last = [
            completion_of(each.sequence).metrics.last_token if step == each.first else self._ends[number - self._stage]
            for each in planned.decodes
        ]
        metrics = StepMetrics(step, end, self._durations[number], True, tick, len(ids), chunks, tuple(rows))
        gaps = tuple(end - at for at in last if at is not None)
        return metrics._replace(rank_seconds=(self._seconds[number],), gaps=gaps)

    def _move_decodes(self, count: int) -> None:
        """Move sequences past the tokens that were planned, and those that came."""
        stop, stage, first = self._stops[count - 1], self._stage, self._first
        found = dict[tuple[int, int], tuple[np.ndarray, float]]()
        for sequence, decode in self._decodes.items():
            planned, received = self._visits(decode, stop), self._visits(decode, first + count)
            sequence.computed = self._computed[sequence] + planned
            sequence.length += planned
            sequence.in_flight += planned - received
            if planned:
                sequence.ready = decode.first + planned * stage
            if received:
                key = decode.first, received
                if key not in found:
                    ends = np.array(self._ends[decode.first - first : count : stage][:received])
                    found[key] = ends, float(np.diff(ends).max(initial=0.0))
                completion = completion_of(sequence)
                completion.num_known = self._known[sequence]
                completion.advance(*found[key])
                self._core.counts["output_tokens"] += received

    def _move_core(self, count: int) -> None:
        """Move everything but the sequences that decode past the first steps."""
        core, scheduler, stage, first = self._core, self._core.scheduler, self._stage, self._first
        stop, begin, now = self._stops[count - 1], self._begin, self._ends[count - 1]
        planned = self._planned[: stop - begin]
        tokens = 0
        for number, each in enumerate(planned, begin):
            for sequence, _, length in each.chunks:
                sequence.ready = number + 1
                tokens += length
        scheduler.running.prompt_rows += tokens
        core.counts["prompt_tokens"] += tokens
        if planned:
            _set_states(self._prompts, planned[-1].states)
            scheduler.chunker.history = planned[-1].history
        scheduler.num_steps = stop
        scheduler.running.slots.reclaim(stop - 1)
        works = [batch.work for batch in self._batches] + [each.work for each in planned]
        slowest = [max(range(i, i + stage), key=self._seconds.__getitem__) for i in range(count)]
        predicted = self._ticks[stage - 1 : stage - 1 + count]
        scheduler.chunker.predictor.confirm(predicted, [bool(works[i].chunks) for i in slowest])
        core.now = now
        entries = {batch.index: (batch, pending) for batch, pending in self._executor.recent}
        for batch, pending in zip(self._batches, self._pendings, strict=True):
            pending.ready = self._ready[batch.index - first]
        low = first + count - stage + 1  # of those that have ended some are in the last ticks
        for step in range(max(begin, low), stop):
            entries[step] = self._batch(step, planned[step - begin])
        recent = [entries[step] for step in range(low, stop) if step in entries]
        batches = {batch.index: batch for batch, _ in recent}
        in_flight, in_stages = range(first + count, stop), [batches[step] for step in range(stop - stage, stop)]
        core.in_flight.move_to([batches[step] for step in in_flight], in_stages)
        ticks = [tick for tick in self._queue.ticks if tick.number >= first + count + stage - 1]
        for step in range(max(begin, first + count + stage - 1), stop):
            number, each = step - first, planned[step - begin]
            ticks.append(Tick(step, each.at, self._ticks[number], each.behind))
        self._queue.move_to([entries[step] for step in in_flight], in_stages, ticks, now)
        self._executor.move_to(recent, now, self._free[stop - 1 - first])

    def _batch(self, step: int, planned: _Planned) -> tuple[Batch, Pending]:
        """Return a step that is in flight afterwards, and its times."""
        chunks, seconds = list[Chunk](), self._seconds[step - self._first]
        for sequence, first, _ in planned.decodes:
            assert sequence.slot is not None
            start = self._computed[sequence] + (step - first) // self._stage
            chunks.append(Chunk(sequence, sequence.slot, start, 1, True, True, sequence.ranks))
        for sequence, start, tokens in planned.chunks:
            assert sequence.slot is not None
            chunks.append(Chunk(sequence, sequence.slot, start, tokens, False, False))
        batch = Batch(step, chunks, work=planned.work, predicted=seconds, rank_seconds=(seconds,))
        return batch, Pending([0] * len(planned.decodes), seconds, self._ready[step - self._first])


_PageEvent = tuple[int, int, int, int, _Decode | None]
"""Number of the step at whose end it is; 0 for a token that comes and 1 for a page that is taken; the token's number
among those of the sequence, or the step that is planned; the sequence's place among those that decode; the sequence."""


def _states(prompts: List[Sequence]) -> list[tuple[int, float, int, float]]:
    return [(each.computed, each.prefill_remaining, each.predicted_at, each.due_share) for each in prompts]


def _set_states(prompts: List[Sequence], states: List[tuple[int, float, int, float]]) -> None:
    for each, state in zip(prompts, states, strict=True):
        each.computed, each.prefill_remaining, each.predicted_at, each.due_share = state
