"""Admission: which waiting sequences get a slot and pages, and which wait for a prefix that another one computes."""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

from longctx.serving.kv_cache.page_pool import Key, PagePool
from longctx.serving.scheduler.batch import Batch, TableRun
from longctx.serving.scheduler.chunking import Chunker
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.page_planner import Growth, PagePlan, PagePlanner, PredictedEnds, Reservation
from longctx.serving.scheduler.policy import (
    Policy,
    TenantShares,
    by_urgency,
    lends_steps,
    relative_slack,
    urgency_order,
)
from longctx.serving.scheduler.preemption import Preemption
from longctx.serving.scheduler.running import Running, arrival_order
from longctx.serving.scheduler.sequence import Sequence, State


def find_prefix(pool: PagePool, sequence: Sequence, page_size: int) -> list[int]:
    """The pages of its longest prefix that is in the cache; at least one token is left to compute."""
    return pool.leading(sequence.keys[: (sequence.length - 1) // page_size]) if sequence.may_share else []


# The share of the rows of prompts below which a sequence is too slow to be waited for by a more urgent one.
_TOO_SLOW = 0.25


@dataclass
class _Leader:
    """A sequence that others wait for, and how it got on since it was looked at last.

    `waiting`: how many pages each waits for. `until`: when it should have come further by prediction.
    """

    sequence: Sequence
    seconds_per_page: float
    registered: int
    computed: int
    prompt_rows: int  # of all prompts, so far
    until: float
    waiting: dict[Sequence, int]

    def is_slow(self, now: float, prompt_rows: int) -> bool:
        """Whether it got few of the rows of prompts, or none for as long as all that is waited for should take."""
        computed, rows = self.sequence.computed - self.computed, prompt_rows - self.prompt_rows
        is_slow = computed < _TOO_SLOW * rows or (computed == 0 and now > self.until)
        if computed:
            self.until = now + (max(self.waiting.values()) - self.sequence.registered) * self.seconds_per_page
        self.registered = self.sequence.registered
        self.computed, self.prompt_rows = self.sequence.computed, prompt_rows
        return is_slow


class PrefixWaits:
    """Sequences that wait for pages which another one computes, and for how long.

    A sequence whose next page another one is computing waits for all pages that both begin with, if these are
    predicted to be there sooner than it could compute them itself. It gives up when it would itself come before the
    other, which is slow: so it never waits longer than computing takes.
    """

    def __init__(self, running: Running, forecast: Forecast, policy: Policy, tenants: TenantShares) -> None:
        self._running, self._forecast, self._policy, self._tenants = running, forecast, policy, tenants
        self._leaders: dict[Sequence, _Leader] = {}
        self._leader_of: dict[Sequence, Sequence] = {}  # of those that wait, or gave up

    def end(self, now: float) -> bool:
        """End the waits that are over; whether there was one."""
        ended = False
        for leader in list(self._leaders.values()):
            there = leader.sequence.registered
            over: list[Sequence] = []
            if leader.sequence.state not in (State.LOADING, State.PREFILLING):
                over, there = list(leader.waiting), max(there, leader.registered)
            elif there >= min(leader.waiting.values(), default=math.inf):
                over = [sequence for sequence, pages in leader.waiting.items() if pages <= there]
            for sequence in over:
                hit = min(there, leader.waiting[sequence]) * self._running.page_size
                sequence.prefix_hit_tokens = max(hit, sequence.prefix_hit_tokens)
                self._forecast.update(sequence)
                self.forget(sequence)
            is_loading = leader.sequence.state is State.LOADING
            if leader.waiting and not is_loading and leader.is_slow(now, self._running.prompt_rows):
                first = self._order(leader.sequence, now)
                slow = [sequence for sequence in leader.waiting if self._order(sequence, now) < first]
                for sequence in slow:
                    del leader.waiting[sequence]
                over += slow
            ended = ended or bool(over)
            if not leader.waiting:
                self._leaders.pop(leader.sequence, None)
        return ended

    def others(self, waiting: list[Sequence]) -> list[Sequence]:
        """The sequences that wait for no prefix."""
        if not self._leaders:
            return waiting
        waits = set().union(*(leader.waiting for leader in self._leaders.values()))
        return [sequence for sequence in waiting if sequence not in waits]

    def forget(self, sequence: Sequence) -> None:
        """It has been admitted, or has ended, or its pages are there."""
        leader = self._leader_of.pop(sequence, None)
        if leader is not None and leader in self._leaders:
            self._leaders[leader].waiting.pop(sequence, None)

    def begin(self, sequence: Sequence, found: int, now: float) -> bool:
        """Whether a sequence of which `found` pages are in the cache waits for more."""
        size = self._running.page_size
        usable = min(len(sequence.keys), (sequence.length - 1) // size)
        if not sequence.may_share or found >= usable:
            return False
        other = self._computing(sequence.keys[found], found)
        if other is None or self._leader_of.get(sequence) is other:
            return False  # no sequence computes the page, or it has been waited for long enough
        pages = min(usable, _common(sequence, other, found + 1))
        alone = self._forecast.time.prefill_seconds(found * size, pages * size, sequence.tpot_target)
        there = min(other.computed, pages * size)
        if self._forecast.time.prefill_seconds(there, pages * size, other.tpot_target) > alone:
            return False
        leader = self._leaders.get(other)
        if leader is None:
            rows, seconds = self._running.prompt_rows, alone / (pages - found)
            leader = _Leader(other, seconds, other.registered, other.computed, rows, now + alone, {})
            self._leaders[other] = leader
        leader.waiting[sequence] = pages
        self._leader_of[sequence] = other
        return True

    def _computing(self, key: object, number: int) -> Sequence | None:
        """Return the sequence that computes the page of this key and number next."""
        return next((s for s in self._running.prefilling if s.registered == number and _key(s, number) == key), None)

    def _order(self, sequence: Sequence, now: float) -> tuple[int, float, float, int]:
        return -sequence.priority, self._tenants.rank(sequence), self._policy.urgency(sequence, now), sequence.order


def _key(sequence: Sequence, number: int) -> object:
    return sequence.keys[number] if number < len(sequence.keys) else None


def _common(one: Sequence, other: Sequence, low: int) -> int:
    """Count the pages both begin with, `low` at least: a key stands for all pages before it, so bisection finds it."""
    high = min(len(one.keys), len(other.keys))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.keys[middle - 1] == other.keys[middle - 1] else (low, middle - 1)
    return low


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
      reservations: of the most urgent sequences that wait for memory, as they were found last.
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
        self.reservations: dict[Sequence, Reservation] = {}
        self._ends: PredictedEnds | None = None  # of those that run now

    @property
    def blocked(self) -> Sequence | None:
        """The most urgent sequence, if it had no room when it was looked at last."""
        return None if self._blocked is None else self._blocked.sequence

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
        if not self.waiting or not (slots.free or (self._optimistic and not slots.draining)):
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
                reservations.append(self._reserve(sequence, self.reservations[sequence].needs, now))
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
        self.reservations = {reservation.sequence: reservation for reservation in reservations}
        if first is not None:
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
        self._running.slots.reclaim(batch.index)
        # The end of what a victim has computed is lost with the least harm.
        return self._planner.plan(sequence, shared, begin=last.get(victims[0]))

    def _free_slot(self, batch: Batch, sequence: Sequence, now: float) -> None:
        """Preempt a prompt for the most urgent sequence, if it has room then. Its slot may have to rest at first."""
        shared = find_prefix(self._pool, sequence, self._running.page_size)
        self._make_way(batch, sequence, shared, now)
        if not (self._running.slots.free or self._running.slots.draining):
            self._remember_blocked(sequence, len(sequence.keys), now)

    def _reserve(self, sequence: Sequence, needs: list[int], now: float) -> Reservation:
        """Return the reservation of a sequence that lacks `needs` pages, as predicted now."""
        reservation = self.reservations.get(sequence) or Reservation(sequence)
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
        if is_partial := len(found) > plan.num_full:
            assert sequence.partial_page is not None
            sequence.computed += sequence.partial_page.tokens
        windows = self._running.begin_windows(sequence)
        if is_partial:
            self._pool.forget(found[-1])  # it is written to from now on
        sequence.cached = sequence.computed if sequence.cached is None else sequence.cached
        lost = max(0, sequence.tokens_to_recompute - max(sequence.computed, sequence.available))
        sequence.recomputed += lost
        sequence.no_preempt_before, sequence.tokens_to_recompute = sequence.computed + 2 * lost, 0
        sequence.prefix_hit_tokens = 0  # they are computed now
        self._forecast.update(sequence)
        if self._growth.is_due(sequence):
            self._growth.grow(sequence)
        assert sequence.slot is not None
        if found:
            batch.tables.append(TableRun(sequence.slot, 0, list(found), windows))
        batch.admitted.append(sequence)
        sequence.slack = relative_slack(sequence, now)
        self.waiting.remove(sequence)
        self._waits.forget(sequence)
        self._tenants.charge(sequence)
