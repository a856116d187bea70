"""Admission: which waiting sequences get a slot and pages, and the memory reserved for one that lacks room.

Source: EASY backfilling of batch schedulers (Lifka 1995; Mu'alem and Feitelson 2001), with pages instead of nodes.
"""

import bisect
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import accumulate

from longctx.serving.kv_cache.page_pool import Key, PagePool
from longctx.serving.scheduler.batch import Batch, TableRun
from longctx.serving.scheduler.chunking import Chunker
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.growth import Growth
from longctx.serving.scheduler.page_planner import PagePlan, PagePlanner
from longctx.serving.scheduler.policy import by_urgency, lends_steps, relative_slack, urgency_order
from longctx.serving.scheduler.preemption import Preemption
from longctx.serving.scheduler.prefix_wait import PrefixWaits, find_prefix
from longctx.serving.scheduler.running import Running, arrival_order
from longctx.serving.scheduler.sequence import Sequence

# Of the pages, what a reservation leaves for those that stay. With none, a reservation that takes just what comes back
# would keep every short prompt with a long answer waiting; with it, the sequence may wait for one more end.
_SPARE = 1 / 32


class PredictedEnds:
    """Predicts when sequences return their pages: prompts take turns, and all max_tokens are sampled.

    Args:
      prompts: (order, seconds) of the prompts that are read: the least order comes first.
      shares: prompts share steps, so that a short one does not wait for the whole of a longer one before it.
      token_seconds: between two tokens of a sequence.
    """

    def __init__(
        self, prompts: Iterable[tuple[tuple[float, float], float]], shares: bool, token_seconds: float, now: float
    ) -> None:
        by_order = sorted(prompts)
        self._orders = [order for order, _ in by_order]
        self._before = [0.0, *accumulate(seconds for _, seconds in by_order)]
        self._seconds = sorted(seconds for _, seconds in by_order) if shares else []
        self._shorter = [0.0, *accumulate(self._seconds)]
        self._shares, self.token_seconds, self._now = shares, token_seconds, now

    def decode_end(self, sequence: Sequence) -> float:
        """Return when a sequence ends whose prompt has been read."""
        tokens = sequence.prompt_length + sequence.max_tokens - sequence.length
        return self._now + tokens * self.token_seconds

    def end(self, sequence: Sequence, order: tuple[float, float]) -> float:
        """Return when a sequence ends that is read, or would be: after the prompts before it, or in turns with all.

        In turns, each of the others has had as much time as this one when it ends, or all that it needs.
        """
        seconds = sequence.prefill_remaining
        ahead = self._before[bisect_left(self._orders, order)]
        if self._shares:
            shorter = bisect_left(self._seconds, seconds)
            ahead = min(ahead, self._shorter[shorter] + seconds * (len(self._seconds) - shorter))
        return self.decode_end(sequence) + seconds + ahead


class Reservation:
    """Memory for a sequence without room: enough pages, at the time when they have come back by prediction.

    Of those that run, some have passed it. These don't put the reservation off, however wrong predictions are: neither
    the time nor what is left by then rests on when they end. So a sequence waits at most until all that run beside it
    when it is blocked have ended, and then for those that were to have ended by then.

    Attributes:
      time: when enough of the others will have returned their pages, and a small share besides; `-inf` if they have,
        and only sequences that were to return theirs by now hold what is missing.
      surplus: pages of each rank that are left then; of all ranks together where sequences grow.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.needs = list[int]()
        self.time, self.surplus = -math.inf, list[int]()
        # Those that have passed: some return their pages by the time of the reservation, others it does not need.
        self._returning, self._staying = set[Sequence](), set[Sequence]()

    def update(
        self, pool: PagePool, needs: list[int], others: Iterable[tuple[Sequence, float]], in_all: bool, margin: int
    ) -> None:
        """Find time and surplus anew.

        Args:
          needs: pages of each rank, or in all, that must be there.
          others: sequences that run, with their predicted ends.
          in_all: pages of all ranks are counted together.
          margin: pages of each rank, or in all, that are not available though they are free.
        """
        self.needs = needs
        returning, staying = set[Sequence](), set[Sequence]()
        back, left = list[Sequence](), list[tuple[float, int, Sequence]]()
        for other, end in others:
            if other in self._returning:
                returning.add(other)
                back.append(other)
            elif other in self._staying:
                staying.add(other)
            elif other is not self.sequence:
                left.append((end, other.order, other))
        self._returning, self._staying = returning, staying
        free = [pool.num_available] if in_all else pool.by_rank
        claims = sum(other.claim for other in staying)
        self.surplus = [pages - need - margin - claims for pages, need in zip(free, self.needs, strict=True)]
        for other in back:
            self._return(pool, other, in_all)
        self.time = -math.inf
        for end, _, other in sorted(left):
            if min(self.surplus) >= _SPARE * (pool.num_pages if in_all else pool.per_rank):
                break
            self._return(pool, other, in_all)
            self.time = end

    def allows(self, pages: List[int], end: float) -> bool:
        """Return whether a sequence that takes `pages` until `end` may pass."""
        return end <= self.time or all(count <= left for count, left in zip(pages, self.surplus, strict=True))

    def pass_by(self, other: Sequence, pages: List[int], end: float) -> None:
        """Let another sequence pass."""
        if end <= self.time:
            self._returning.add(other)
        else:
            self._staying.add(other)
            self.surplus = [left - count for count, left in zip(pages, self.surplus, strict=True)]

    def _return(self, pool: PagePool, other: Sequence, in_all: bool) -> None:
        pages = [x + y for x, y in zip(pool.alone(other.order), other.reserved, strict=True)]
        pages = [sum(pages) + other.promised] if in_all else pages
        self.surplus = [left + count for left, count in zip(self.surplus, pages, strict=True)]


# Seconds after which those who wait are ranked again, though nothing has changed but the time.
_RANKED_AGAIN = 0.1
# Sequences that begin to wait for a prefix in a step; those after them are looked at in the next step.
_PASSED_OVER = 128


@dataclass
class _Blocked:
    """The most urgent sequence had no room, though its prefix was looked up to the first key that is `missing`.

    It is remembered, so that a found prefix of any length is not looked up in every step, nor all who wait ranked.
    """

    sequence: Sequence
    num_returned: int  # how often the pool had been given pages back
    missing: Key | None
    until: float


class Admission:
    """Admits sequences in the policy's order while slots and memory last.

    The most urgent one that has no room gets a reservation (`Reservation`), and so does the most urgent of those that
    run and wait for memory to grow. Less urgent ones that have room may pass them if these get theirs no later for it:
    so a stream of small requests delays a large one for a bounded time only. A sequence that waits for pages of its
    prefix (`PrefixWaits`) is passed over.

    Args:
      planner: plans where their pages will be.
      growth: promises pages to those that grow.
      preemption: makes way for the most urgent, if admission is optimistic.
      optimistic: prompts give way to more urgent ones.

    Attributes:
      waiting: in order of arrival.
    """

    def __init__(
        self,
        running: Running,
        planner: PagePlanner,
        chunker: Chunker,
        forecast: Forecast,
        growth: Growth,
        preemption: Preemption,
        optimistic: bool,
    ) -> None:
        self._running, self._pool, self._planner = running, running.pool, planner
        self._growth, self._preemption, self._chunker = growth, preemption, chunker
        self._policy, self._tenants = chunker.policy, chunker.tenants
        self._forecast, self._optimistic = forecast, optimistic
        self.waiting: list[Sequence] = []
        self._waits = PrefixWaits(running, forecast, chunker.policy, chunker.tenants)
        self._blocked: _Blocked | None = None
        self._reservations: dict[Sequence, Reservation] = {}
        self._ends: PredictedEnds | None = None  # of those that run now

    @property
    def blocked(self) -> Sequence | None:
        """The most urgent sequence, if it had no room when it was looked at last."""
        return None if self._blocked is None else self._blocked.sequence

    @property
    def reservations(self) -> dict[Sequence, Reservation]:
        """Return the reservations of the most urgent sequences that wait for memory, as they were found last."""
        return self._reservations

    def waits_for(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence that computes the pages of a prefix which a sequence waits for."""
        return self._waits.leader_of(sequence)

    def add(self, sequence: Sequence) -> None:
        """Let a new or preempted sequence wait."""
        bisect.insort(self.waiting, sequence, key=arrival_order)
        sequence.least_pages = self._planner.least_pages(sequence)
        self._rank_again()

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that waits no more."""
        self.waiting.remove(sequence)
        self._waits.forget(sequence)
        if self.blocked is sequence:
            self._blocked = None
        self._rank_again()

    def admit(self, batch: Batch, now: float) -> None:
        """Admit the sequences that can be; those that lack memory are added to `batch.blocked`."""
        self._admit_waiting(batch, now)
        if self._blocked is not None:  # found in this step, or before, and nothing has changed since
            batch.blocked.append(self._blocked.sequence)

    def _admit_waiting(self, batch: Batch, now: float) -> None:
        slots = self._running.slots
        if not self.waiting or not (slots.free or (self._optimistic and not slots.resting)):
            return
        known = None if self._waits.end(now) else self._still_blocked()
        if known is not None and now <= known.until:
            return
        self._ends = None
        self._blocked = known = None if self._optimistic else known  # others may give way
        growing = min(batch.blocked, key=lambda sequence: urgency_order(self._policy, sequence, now), default=None)
        growing_order = None if growing is None else urgency_order(self._policy, growing, now)
        reservations = [] if growing is None else [self._reserve(growing, [self._growth.needs(growing)], now)]
        passed_over, first = 0, None
        for sequence in self._by_urgency(self._waits.others(self.waiting), now):
            if passed_over == _PASSED_OVER or sequence.in_flight:
                return
            if not slots.free:
                self._free_slot(batch, sequence, now)
                if not slots.free:
                    return
            if known is not None and sequence is known.sequence:
                first = sequence
                reservations.append(self._reserve(sequence, self._reservations[sequence].needs, now))
                known.until = now + _RANKED_AGAIN
                break
            shared = find_prefix(self._pool, sequence, self._running.page_size)
            if self._waits.begin(sequence, len(shared), now):
                passed_over += 1
                continue
            plan, comes_after = self._planner.plan(sequence, shared), False
            if growing_order is not None and growing_order < urgency_order(self._policy, sequence, now):
                comes_after = plan is not None and not self._passes(reservations, sequence, shared, now)
            elif plan is None:
                plan = self._make_way(batch, sequence, shared, now)
            if plan is None or comes_after:
                first = sequence
                self._remember_blocked(sequence, len(shared), now, comes_after)
                reservations.append(self._reserve(sequence, self._planner.needs(sequence, shared), now))
                break
            self._admit(batch, sequence, plan, now)
            self._count_passed(batch.blocked, [sequence], now)
        self._reservations = {reservation.sequence: reservation for reservation in reservations}
        if first is not None:
            first.blocked_since = now if first.blocked_since is None else first.blocked_since
            self._let_pass(batch, reservations, _PASSED_OVER - passed_over, now)

    def _let_pass(self, batch: Batch, reservations: list[Reservation], most_passed_over: int, now: float) -> None:
        """Admit less urgent ones that have room, if reservations hold."""
        pool, page_size = self._pool, self._running.page_size
        first, free, passed_over = reservations[-1].sequence, pool.num_available, 0
        token_seconds = self._predict_ends(now).token_seconds
        time = min(reservation.time for reservation in reservations) - now
        spare = min(sum(reservation.surplus) for reservation in reservations)
        # A quick look, since thousands may wait.
        candidates = {
            s: pages
            for s in self._waits.others(self.waiting)
            if (pages := s.least_pages - s.prefix_hit_tokens // page_size - 1) <= free
            and (pages <= spare or s.prefill_remaining + token_seconds * s.max_tokens <= time)
            and s is not first
        }
        passed = list[Sequence]()
        for sequence in self._by_urgency(list(candidates), now):
            if not self._running.slots.free or passed_over == most_passed_over:
                break
            if sequence.in_flight or candidates[sequence] > pool.num_available:
                continue
            shared = find_prefix(pool, sequence, page_size)
            if self._waits.begin(sequence, len(shared), now):
                passed_over += 1
                continue
            plan = self._planner.plan(sequence, shared)
            if plan is not None and self._passes(reservations, sequence, shared, now):
                self._admit(batch, sequence, plan, now)
                passed.append(sequence)
        self._count_passed([*batch.blocked, *self._waits.others(self.waiting)], passed, now)

    def _passes(self, reservations: list[Reservation], sequence: Sequence, shared: list[int], now: float) -> bool:
        """Whether a sequence may be admitted before those with reservations; if so, these know."""
        pages = self._planner.needs(sequence, shared, to_begin=False)
        end = self._predict_ends(now).end(sequence, urgency_order(self._policy, sequence, now))
        if not all(reservation.allows(pages, end) for reservation in reservations):
            return False
        for reservation in reservations:
            reservation.pass_by(sequence, pages, end)
        return True

    def _make_way(self, batch: Batch, sequence: Sequence, shared: list[int], now: float) -> PagePlan | None:
        """Preempt prompts for the most urgent sequence, if that gives it room: where its pages will be then."""
        if not self._optimistic:
            return None
        last = {s: self._pool.rank_of(s.pages[-1]) for s in self._running.prefilling if s.pages}
        fits = lambda victims: self._planner.plan(sequence, shared, victims) is not None  # noqa: E731
        victims = self._preemption.make_way(sequence, now, fits, spared=batch.admitted)
        if not victims:
            return None
        self._running.slots.wake(batch.index)
        # The end of what a victim has computed is lost with the least harm.
        return self._planner.plan(sequence, shared, begin=last.get(victims[0]))

    def _free_slot(self, batch: Batch, sequence: Sequence, now: float) -> None:
        """Preempt a prompt for the most urgent sequence, if it has room then. Its slot may have to rest at first."""
        shared = find_prefix(self._pool, sequence, self._running.page_size)
        self._make_way(batch, sequence, shared, now)
        if not (self._running.slots.free or self._running.slots.resting):
            self._remember_blocked(sequence, len(sequence.keys), now)

    def _reserve(self, sequence: Sequence, needs: list[int], now: float) -> Reservation:
        """Return the reservation of a sequence that lacks `needs` pages, as predicted now."""
        reservation = self._reservations.get(sequence) or Reservation(sequence)
        ends = self._predict_ends(now)
        running = [(s, ends.end(s, urgency_order(self._policy, s, now))) for s in self._running.prefilling]
        running += [(s, ends.decode_end(s)) for s in self._running.decoding]
        # Nothing is promised to decodes under optimistic admission.
        margin = len(running) if self._optimistic else 0
        reservation.update(self._pool, needs, running, self._planner.grows, margin)
        return reservation

    def _predict_ends(self, now: float) -> PredictedEnds:
        if self._ends is None:
            prompts = [(urgency_order(self._policy, s, now), s.prefill_remaining) for s in self._running.prefilling]
            seconds = self._chunker.token_seconds(self._running.decoding)
            self._ends = PredictedEnds(prompts, lends_steps(self._policy), seconds, now)
        return self._ends

    def _count_passed(self, others: list[Sequence], passed: list[Sequence], now: float) -> None:
        """Let those know that less urgent ones have been admitted before them."""
        orders = sorted((*urgency_order(self._policy, sequence, now), sequence.order) for sequence in passed)
        for other in others if orders else ():
            own = *urgency_order(self._policy, other, now), other.order
            other.passed_by += len(orders) - bisect.bisect_right(orders, own)

    def _remember_blocked(self, sequence: Sequence, found: int, now: float, has_room: bool = False) -> None:
        missing = sequence.keys[found] if found < len(sequence.keys) else None
        num_returned = -1 if has_room else self._pool.num_returned  # it waits for another one's memory
        self._blocked = _Blocked(sequence, num_returned, missing, now + _RANKED_AGAIN)

    def _rank_again(self) -> None:
        if self._blocked is not None:
            self._blocked.until = -math.inf

    def _by_urgency(self, waiting: list[Sequence], now: float) -> Iterator[Sequence]:
        """Sort sequences by their turn to be admitted."""
        return by_urgency(self._policy, waiting, now, self._tenants)

    def _still_blocked(self) -> _Blocked | None:
        """The most urgent sequence that had no room, if nothing has changed since that might give it some."""
        blocked, pool = self._blocked, self._pool
        if blocked is None or blocked.num_returned != pool.num_returned:
            return None
        return None if blocked.missing is not None and pool.find(blocked.missing) is not None else blocked

    def _admit(self, batch: Batch, sequence: Sequence, plan: PagePlan, now: float) -> None:
        found, page_size = plan.found, self._running.page_size
        self._ends = None
        self._running.begin_prefill(sequence, found, plan.placement, plan.stop, plan.total)
        sequence.registered, sequence.computed = plan.num_full, plan.num_full * page_size
        if len(found) > plan.num_full:
            assert sequence.partial_page is not None
            self._pool.forget(found[-1])  # it is written to from now on
            sequence.computed += sequence.partial_page.tokens
        sequence.cached = sequence.computed if sequence.cached is None else sequence.cached
        lost = max(0, sequence.lost - max(sequence.computed, sequence.available))
        sequence.recomputed += lost
        sequence.protected, sequence.lost = sequence.computed + 2 * lost, 0
        sequence.prefix_hit_tokens = 0  # they are computed now
        sequence.blocked_since = None
        self._forecast.update(sequence)
        if self._growth.is_due(sequence):
            self._growth.grow(sequence)
        assert sequence.slot is not None
        if found:
            batch.tables.append(TableRun(sequence.slot, 0, list(found)))
        batch.admitted.append(sequence)
        sequence.slack = relative_slack(sequence, now)
        self.waiting.remove(sequence)
        self._waits.forget(sequence)
        self._tenants.charge(sequence)
