"""Steps that were planned without moving the core, and what moves it past them: pages, tokens, times and counts."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np

from longctx.serving.engine.core import Core
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue, Tick
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.sequence import Sequence, State, completion_of
from longctx.simulation.instance.virtual_executor import Pending, VirtualExecutor
from longctx.simulation.record import Totals


class Decode(NamedTuple):
    """A sequence that decodes: the first step that it is in, and its last."""

    sequence: Sequence
    first: int
    last: int


class Planned(NamedTuple):
    """A step: its prompts' chunks as (sequence, first token, tokens), and the state of all prompts after it."""

    work: Work
    decodes: List[Decode]
    chunks: List[tuple[Sequence, int, int]]
    at: float
    behind: int  # batches in flight
    states: List[tuple[int, float, int, float]]
    history: tuple[tuple[int, ...], int]


PageEvent = tuple[int, int, int, int, Decode | None]
"""Number of the step at whose end it is; 0 for a token that comes and 1 for a page that is taken; the token's number
among those of the sequence, or the step that is planned; the sequence's place among those that decode; the sequence."""


class PlannedSteps:
    """Steps whose sizes and times are known, past which a core, its queue and its executor are moved.

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
        self._planned = list[Planned]()
        self._ends, self._durations = list[float](), list[float]()
        self._stops = list[int]()  # steps that are planned after each end
        self._groups: list[list[Decode]] = [[] for _ in range(self._stage)]
        self._groups_before = [*self._groups]

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

    def _visits(self, decode: Decode, stop: int) -> int:
        """Return how many steps before `stop` decode a sequence."""
        return len(range(decode.first, min(stop, decode.last + 1), self._stage))

    def _page_events(self, count: int) -> "list[PageEvent]":
        """Return when decodes need pages, or get tokens that complete pages which others may find."""
        core, stage, first, size = self._core, self._stage, self._first, self._core.scheduler.running.page_size
        found, stop = list[PageEvent](), self._stops[count - 1]
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
        is_new = len(chunks) == 1 or pool.finds_none(sequence.keys[first:stop])
        for _, start, tokens in chunks[-1:] if is_new else chunks:
            sequence.computed = start + tokens
            if sequence.computed > len(sequence.pages) * running.page_size:
                running.extend(sequence, sequence.computed, start)
            if sequence.registered < len(sequence.keys):
                running.register(sequence)
        chunks.clear()

    def _take_page(self, event: "PageEvent") -> None:
        _, _, step, _, decode = event
        assert decode is not None
        start = self._computed[decode.sequence] + (step - decode.first) // self._stage
        self._core.scheduler.running.extend(decode.sequence, start + 1, start)

    def _receive(self, event: "PageEvent") -> None:
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

    def _set_computed(self, decode: Decode, number: int) -> None:
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

    def _metrics(self, number: int, planned: Planned) -> StepMetrics:
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
            set_states(self._prompts, planned[-1].states)
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

    def _batch(self, step: int, planned: Planned) -> tuple[Batch, Pending]:
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


def states_of(prompts: List[Sequence]) -> list[tuple[int, float, int, float]]:
    return [(each.computed, each.prefill_remaining, each.predicted_at, each.due_share) for each in prompts]


def set_states(prompts: List[Sequence], states: List[tuple[int, float, int, float]]) -> None:
    for each, state in zip(prompts, states, strict=True):
        each.computed, each.prefill_remaining, each.predicted_at, each.due_share = state
