"""Decides what each step computes: plain Python over plain data, deterministic, time comes in with each call.

It plans ahead of results: a sampled token's value is not needed to plan its successor's row. So `computed` and
`length` of a sequence run ahead, and a sequence that turns out to have ended leaves some rows in steps already under
way, whose results nobody takes. That is safe, because steps run in order: what a later step writes into a page that was
given back comes after, in every stage. What is done ahead of a step, in all stages at once, is not in that order: so
slots, and copies of pages, wait until no batch under way has to do with them.

Source: continuous batching with chunked prefill after Mnemosyne, sections 4.1 and 4.3 (a chunk follows the one before
it into the pipeline at once), and Medha, sections 3.1, 4.1 and 4.3.
"""

import bisect
from collections import deque
from typing import Any, Literal

from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.placement import Grown, Need, Placement, Placer
from longctx.serving.parallel_plan import is_sharded
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Batch, Chunk, TableRun, parts_of
from longctx.serving.scheduler.chunking import Chunker
from longctx.serving.scheduler.policy import rank, relative_slack
from longctx.serving.scheduler.sequence import Sequence, State, Tail
from longctx.serving.scheduler.slo import Slo

# A change of predictions that is worth making them anew.
_NOTABLE = 0.05


class Scheduler:
    """Continuous batching: in every step all decodes, and chunks of prompts as the chunker says."""

    def __init__(
        self,
        chunker: Chunker,
        pool: PagePool,
        page_size: int,
        max_running: int,
        admission: Literal["reserve", "optimistic"] = "reserve",
        slo: Slo | None = None,
        placer: Placer | None = None,
    ) -> None:
        self.chunker, self.pool, self.page_size = chunker, pool, page_size
        self.plan, self.placer = chunker.plan, placer or Placer()
        self._all_ranks = tuple(range(self.plan.context))
        self.max_running, self.admission, self.slo = max_running, admission, slo or Slo()
        self.waiting: list[Sequence] = []  # these three in order of arrival
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.num_preempted = 0
        self.num_steps = 0
        self._factor = chunker.predictor.factor
        self._slots = list(range(max_running - 1, -1, -1))
        self._resting: deque[tuple[int, int]] = (
            deque()
        )  # slots that were given back, and from which step on they are free
        self._forks: list[tuple[Sequence, tuple[int, int]]] = []  # and the page that each copies, once it is written

    # What comes in.

    def check(self, prompt_length: int, max_tokens: int, samples: int) -> None:
        """ValueError if such a request could never be admitted: pool or slots are too few for it alone."""
        if samples > self.max_running:
            raise ValueError(
                f"n={samples} continuations are more than the max_running={self.max_running} of the engine"
            )
        own = self._pages_of(prompt_length + max_tokens - 1)
        at_first = own if self.admission == "reserve" else self._pages_of(prompt_length)
        shared = self._shared_by_followers(prompt_length)
        empty = [self.pool.per_rank] * self.pool.num_ranks
        for stop, followers in ((own, 0), (at_first, samples - 1)):
            need = Need(0, stop, shared, followers, (0,) * self.pool.num_ranks, None)
            if self.placer.place(0, need, empty, [0.0] * self.pool.num_ranks) is None:
                pages = stop + followers * (stop - shared)
                raise ValueError(
                    f"prompt and max_tokens need {pages} pages of {self.page_size} tokens, "
                    f"more than the {self.pool.num_pages} that the engine has"
                    + (f", {self.pool.per_rank} on each rank" if self.pool.num_ranks > 1 else "")
                )

    def count_cached(self, keys: list[Any]) -> int:
        """Tokens of the longest prefix of such pages that is in the cache."""
        missing = (i for i, key in enumerate(keys) if self.pool.find(key) is None)
        return next(missing, len(keys)) * self.page_size

    def add(self, sequence: Sequence) -> None:
        """Put a sequence, with its followers, into the queue; ValueError as from `check`."""
        self.check(sequence.prompt_length, sequence.max_tokens, 1 + len(sequence.followers))
        sequence.prefix_hit_tokens = self.count_cached(sequence.keys) if sequence.may_share else 0
        self._promise(sequence)
        self._look_ahead(sequence)
        bisect.insort(self.waiting, sequence, key=_arrival)

    def receive(self, sequence: Sequence) -> None:
        """A planned sample of the sequence has arrived, and `keys` been extended by the page that it completes."""
        sequence.in_flight -= 1
        assert sequence.in_flight >= 0
        if sequence.is_running:
            self._register(sequence)

    def finish(self, sequence: Sequence, tail: Tail | None = None) -> None:
        """End a sequence, whatever its state: it gives everything back. Followers that wait for it end too.

        `tail` leaves its last, partial page to the next turn of its session.
        """
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            if tail is not None and tail.number < len(sequence.pages):
                self.pool.register(sequence.pages[tail.number], tail.key)
            self._remove(sequence)
        sequence.to(State.FINISHED)
        for follower in sequence.followers:
            follower.to(State.FINISHED)
        sequence.followers = []

    def _promise(self, sequence: Sequence) -> None:
        """When its first token is due, and that of its followers, and how long each may take."""
        ttft = sequence.ttft_deadline
        if ttft is None:
            ttft = self.slo.ttft(self._prefill_seconds(0, sequence.prompt_length))
        for each in (sequence, *sequence.followers):
            each.deadline, each.ttft_budget = each.arrival + ttft, ttft
            each.tpot_target = self.slo.tpot if each.tpot_target is None else each.tpot_target

    # What goes out.

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None if there is nothing to compute."""
        batch = Batch(self.num_steps)
        self._heed_corrections()
        while self._resting and self._resting[0][0] <= batch.index:
            self._slots.append(self._resting.popleft()[1])
        self._plan_decodes(batch)
        self._set_up_forks(batch)
        self._admit(batch, now)
        prompts = [sequence for sequence in self.prefilling if sequence.ready <= batch.index]
        for sequence, count in self.chunker.pack(prompts, batch.chunks, now):
            assert 0 < count <= sequence.remaining
            self._plan(batch, sequence, count)
            self._look_ahead(sequence)
        if not batch.chunks:
            assert not batch.admitted
            return None
        for chunk in batch.chunks:
            if chunk.samples and not chunk.decodes:
                self._begin_decoding(chunk.sequence)
        self._predict(batch)
        self.chunker.note(batch.chunks)
        self.num_steps += 1
        return batch

    def idle(self) -> Batch:
        """A step that computes nothing, so that batches in later stages go on."""
        self.num_steps += 1
        self.chunker.note([])
        return Batch(self.num_steps - 1)

    @property
    def is_held_up(self) -> bool:
        """Whether those who wait may be admitted after some idle steps."""
        return bool(self.waiting and self._resting)

    def _predict(self, batch: Batch) -> None:
        """Its work is that of the rank that it takes longest."""
        num_ranks, seconds = self.plan.context, self.chunker.predictor.seconds
        works = [Work.of(parts_of(batch.chunks, rank, num_ranks)) for rank in range(num_ranks)]
        batch.work = works[0] if num_ranks == 1 else max(works, key=seconds)
        batch.predicted = seconds(batch.work)

    def _plan_decodes(self, batch: Batch) -> None:
        # The most dispensable last: whoever is put back for another is not in the batch yet.
        for sequence in sorted(self.decoding, key=_dispensable):
            if sequence.state is not State.DECODING or sequence.is_drained or sequence.ready > batch.index:
                continue  # put back for one before it, or all is planned, or its token is still in the stages
            if sequence.computed == len(sequence.pages) * self.page_size and not self._make_room(sequence):
                continue
            self._plan(batch, sequence, 1)

    def _plan(self, batch: Batch, sequence: Sequence, count: int) -> None:
        """Add the next tokens of a sequence to the batch."""
        start = sequence.computed
        first = len(sequence.pages)
        assert sequence.slot is not None
        assert sequence.placement is not None
        if start + count > first * self.page_size:
            for number in range(first, self._pages_of(start + count)):
                rank = sequence.placement.rank(number)
                reserved = sequence.reserved[rank] > 0
                sequence.reserved[rank] -= reserved
                sequence.pages.append(self.pool.allocate(rank, reserved))
                if rank not in sequence.ranks:
                    sequence.ranks = tuple(sorted((*sequence.ranks, rank)))
            batch.tables.append(TableRun(sequence.slot, first, sequence.pages[first:]))
        samples = count == sequence.remaining
        decodes = sequence.state is State.DECODING
        sharded = self._is_sharded(sequence)
        ranks = self._all_ranks if sharded else sequence.ranks
        batch.chunks.append(Chunk(sequence, sequence.slot, start, count, samples, decodes, ranks, sharded))
        sequence.computed += count
        if samples:
            sequence.length += 1
            sequence.in_flight += 1
            sequence.ready = batch.index + self.plan.stage
        if sequence.registered < sequence.computed // self.page_size:
            self._register(sequence)

    def _is_sharded(self, sequence: Sequence) -> bool:
        if not self.plan.shards_rows:
            return False
        decodes = sequence.state is State.DECODING
        return is_sharded(self.plan, decodes, sequence.remaining, self.chunker.chunking.tokens)

    def _ranks(self, sequence: Sequence) -> tuple[int, ...]:
        """That compute its next tokens."""
        assert sequence.placement is not None
        if self._is_sharded(sequence):
            return self._all_ranks
        return sequence.ranks or (sequence.placement.rank(0),)

    def _look_ahead(self, sequence: Sequence) -> None:
        """Predict how long its prompt takes from here on."""
        start = min(max(sequence.computed, sequence.prefix_hit_tokens), sequence.length - 1)
        sequence.prefill_remaining = self._prefill_seconds(start, sequence.length)

    def _prefill_seconds(self, start: int, stop: int) -> float:
        """Of reading a prompt's tokens alone; those that are sharded, all ranks read."""
        rows = self.chunker.chunking.tokens
        sharded = is_sharded(self.plan, False, stop - start, rows)
        return self.chunker.predictor.prefill_seconds(start, stop, rows) / (self.plan.context if sharded else 1)

    def _heed_corrections(self) -> None:
        """Where the device turns out to be another than predicted, predict anew how long all prompts take.

        Deadlines stay: what was promised is what is measured.
        """
        factor = self.chunker.predictor.factor
        if abs(factor / self._factor - 1) > _NOTABLE:
            self._factor = factor
            for sequence in (*self.waiting, *self.prefilling):
                self._look_ahead(sequence)

    def _begin_decoding(self, sequence: Sequence) -> None:
        """A prompt is planned to its end: its sequence decodes from the next step on, its followers fork off."""
        self.prefilling.remove(sequence)
        sequence.to(State.DECODING)
        bisect.insort(self.decoding, sequence, key=_arrival)
        full = self._shared_by_followers(sequence.prompt_length)
        for follower in sequence.followers:
            # Full pages are shared. The one with the prompt's last token is copied, since every sample goes on in it
            # differently, and that token is computed again: its logits are drawn from once more. It is held until then.
            for page in sequence.pages[: full + 1]:
                self.pool.share(page)
            rank = self.pool.rank_of(sequence.pages[full])
            follower.reserved[rank] -= 1
            copy = self.pool.allocate(rank, reserved=True)
            follower.pages = [*sequence.pages[:full], copy]
            follower.ranks = tuple(sorted({*map(self.pool.rank_of, follower.pages)}))
            follower.placement = sequence.placement
            follower.ready = sequence.ready
            follower.keys = list(sequence.keys)
            follower.registered = full
            follower.computed = follower.cached = follower.prompt_length - 1
            self._look_ahead(follower)
            follower.slack = sequence.slack
            follower.to(State.PREFILLING)
            bisect.insort(self.prefilling, follower, key=_arrival)
            self._forks.append((follower, (sequence.pages[full], copy)))
        sequence.followers = []

    def _set_up_forks(self, batch: Batch) -> None:
        """Followers whose leader's prompt has been through all stages."""
        ready = [fork for fork in self._forks if fork[0].ready <= batch.index]
        self._forks = [fork for fork in self._forks if fork[0].ready > batch.index]
        for follower, copy in ready:
            assert follower.slot is not None
            self.pool.release([copy[0]])
            batch.admitted.append(follower)
            batch.copies.append(copy)
            batch.tables.append(TableRun(follower.slot, 0, list(follower.pages)))

    # Admission.

    def _admit(self, batch: Batch, now: float) -> None:
        if not self.waiting or not self._slots:
            return
        for sequence in rank(self.chunker.policy, self.waiting, now):
            if not self._try_to_admit(batch, sequence):
                break  # nobody overtakes: else a large request might wait for ever
            sequence.slack = relative_slack(sequence, now)
            self.waiting.remove(sequence)

    def _try_to_admit(self, batch: Batch, sequence: Sequence) -> bool:
        if len(self._slots) < 1 + len(sequence.followers) or sequence.in_flight:
            return False
        # All that it may ever compute, or only what it has to before it can sample.
        reach = sequence.prompt_length + sequence.max_tokens - 1
        total = self._pages_of(reach if self.admission == "reserve" else min(sequence.length, reach))
        fork, followers = self._shared_by_followers(sequence.prompt_length), len(sequence.followers)
        needed = total + (total - fork) * followers
        if needed - min(len(sequence.keys) + 1, self.pool.num_held) > self.pool.num_available:
            return False  # whatever might be found: so a long prompt's keys are not looked up in vain in every step
        shared = self._find_prefix(sequence)
        tail = self._find_tail(sequence, len(shared))
        found = shared if tail is None else [*shared, tail]
        placement = self._place(sequence, found, total, fork)
        if placement is None and not (self.prefilling or self.decoding):
            # Nobody will give room back: what was found lies where the rest has none.
            shared, tail, found = [], None, []
            placement = self._place(sequence, found, total, fork)
        if placement is None:
            return False

        for page in found:
            self.pool.share(page)
        if tail is not None:
            self.pool.forget(tail)  # it is written to from now on
        sequence.placement = placement
        sequence.reserved = placement.counts(len(found), total)
        sequence.ranks = tuple(sorted({*map(self.pool.rank_of, found)}))
        sequence.pages = found
        sequence.registered = len(shared)
        sequence.computed = len(shared) * self.page_size
        if tail is not None and sequence.tail is not None:
            sequence.computed += sequence.tail.tokens
        sequence.cached = sequence.computed if sequence.cached is None else sequence.cached
        sequence.prefix_hit_tokens = 0  # it is found
        self._look_ahead(sequence)
        sequence.slot = self._slots.pop()
        sequence.to(State.PREFILLING)
        bisect.insort(self.prefilling, sequence, key=_arrival)
        for follower in sequence.followers:
            follower.slot, follower.reserved = self._slots.pop(), placement.counts(fork, total)
        for holder in (sequence, *sequence.followers):
            self.pool.reserve(holder.reserved)
        if found:
            batch.tables.append(TableRun(sequence.slot, 0, list(found)))
        batch.admitted.append(sequence)
        return True

    def _place(self, sequence: Sequence, found: list[int], total: int, fork: int) -> Placement | None:
        """Where its pages are to be, from those that were found to `total`; None if memory does not suffice now."""
        pool, running = self.pool, (*self.prefilling, *self.decoding)
        available = [pool.available(rank) for rank in range(pool.num_ranks)]
        held, load = [0] * pool.num_ranks, [0.0] * pool.num_ranks
        for page in found:
            held[pool.rank_of(page)] += 1
            available[pool.rank_of(page)] -= pool.is_idle(page)
        if min(available) < 0:
            return None  # idle pages that were found may be promised to others
        for other in running:
            assert other.placement is not None
            # Where nothing is promised, running sequences shall not be put back at once for a new one.
            available[other.placement.rank(len(other.pages))] -= self.admission == "optimistic"
            if other.state is State.PREFILLING:
                ranks = self._ranks(other)
                for rank in ranks:
                    load[rank] += other.prefill_remaining / len(ranks)
        last = pool.rank_of(found[-1]) if found else None
        need = Need(len(found), total, fork, len(sequence.followers), tuple(held), last)
        return self.placer.place(sequence.order, need, [max(0, pages) for pages in available], load)

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """The pages of its longest prefix that is in the cache; at least one token is left to compute."""
        pages: list[int] = []
        if sequence.may_share:
            for key in sequence.keys[: (sequence.length - 1) // self.page_size]:
                page = self.pool.find(key)
                if page is None:
                    break
                pages.append(page)
        return pages

    def _find_tail(self, sequence: Sequence, num_full: int) -> int | None:
        """The partial page of its session, if all pages before it were found. Nobody holds it: who does, hides it."""
        tail = sequence.tail
        if (
            tail is None
            or not sequence.may_share
            or sequence.followers
            or num_full != tail.number
            or num_full * self.page_size + tail.tokens >= sequence.length
        ):
            return None
        return self.pool.find(tail.key)

    # Memory.

    def _make_room(self, sequence: Sequence) -> bool:
        """See to it that a decode can have a page; False if it was itself put back for that.

        Nobody who comes before it: the first decode of the highest priority always goes on.
        """
        rank = self._next_rank(sequence)
        while sequence.reserved[rank] == 0 and self.pool.available(rank) == 0:
            holders = (
                s for s in (*self.prefilling, *self.decoding) if rank in s.ranks or s.reserved[rank] or s is sequence
            )
            victim = max(holders, key=_dispensable)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _next_rank(self, sequence: Sequence) -> int:
        """Where its next page goes: where it was meant to, or if memory is short there, to where there is some."""
        number, placement, pool = len(sequence.pages), sequence.placement, self.pool
        assert placement is not None
        rank = placement.rank(number)
        if sequence.reserved[rank] or not isinstance(placement, Grown):
            return rank
        if pool.available(rank) and placement.counts(0, number)[rank] < self.placer.limit:
            return rank
        others = [other for other in range(pool.num_ranks) if other != rank and pool.available(other)]
        if others:
            rank = min(others, key=lambda other: (other in sequence.ranks, -pool.available(other)))
            # A copy: followers have the same placement, but not the same pages.
            sequence.placement = Grown(placement.num_ranks, [run for run in placement.runs if run[0] < number])
            sequence.placement.grow(number, rank)
        return rank

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        sequence.preemptions += 1
        sequence.recomputed += sequence.computed
        self._remove(sequence)
        self._look_ahead(sequence)
        sequence.to(State.WAITING)
        bisect.insort(self.waiting, sequence, key=_arrival)

    def _remove(self, sequence: Sequence) -> None:
        """Take its slot, pages and promises from a running sequence."""
        (self.decoding if sequence.state is State.DECODING else self.prefilling).remove(sequence)
        for holder in (sequence, *sequence.followers):
            assert holder.slot is not None
            if self.plan.stage == 1:
                self._slots.append(holder.slot)
            else:
                self._resting.append((self.num_steps - 1 + self.plan.stage, holder.slot))
            self.pool.unreserve(holder.reserved)
            holder.slot, holder.reserved = None, []
        for fork in [fork for fork in self._forks if fork[0] is sequence]:
            self._forks.remove(fork)
            self.pool.release([fork[1][0]])
        self.pool.release(sequence.pages)
        sequence.pages, sequence.registered, sequence.computed, sequence.ranks, sequence.ready = [], 0, 0, (), 0

    def _register(self, sequence: Sequence) -> None:
        """Offer full pages, whose tokens are known and planned to be computed, for sharing."""
        full = min(len(sequence.keys), sequence.computed // self.page_size)
        for i in range(sequence.registered, full):
            self.pool.register(sequence.pages[i], sequence.keys[i])
        sequence.registered = max(sequence.registered, full)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _shared_by_followers(self, prompt_length: int) -> int:
        """Full pages of a prompt that come before the page of its last token."""
        return (prompt_length - 1) // self.page_size


def _arrival(sequence: Sequence) -> int:
    return sequence.order


def _dispensable(sequence: Sequence) -> tuple[bool, int, int]:
    """Prompts that are half read rather than decodes, the least priority, then who came last."""
    return sequence.state is State.PREFILLING, -sequence.priority, sequence.order
