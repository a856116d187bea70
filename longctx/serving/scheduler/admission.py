"""Which waiting sequences get a slot and pages, and when."""

import bisect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.placement import Grown, Need, Placement, Placer
from longctx.serving.scheduler.batch import Batch, TableRun
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.growth import Growth
from longctx.serving.scheduler.policy import Policy, by_urgency, relative_slack
from longctx.serving.scheduler.preemption import Preemption
from longctx.serving.scheduler.prefix_wait import PrefixWaits, find_prefix
from longctx.serving.scheduler.running import Running, arrival_order
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.tenants import TenantShares

# Seconds after which those who wait are ranked again, though nothing has changed but the time.
_RANKED_AGAIN = 0.1
# Sequences that begin to wait for a prefix in a step; those after them are looked at in the next step.
_PASSED_OVER = 128
# Sequences without room that are looked at in a step, in search of smaller ones that have it.
_LOOKED_AT = 16
# The share of the time to its deadline, as it was promised, for which a sequence without room may be passed by others.
PASSING_SHARE = 0.1


@dataclass
class _Blocked:
    """The most urgent sequence had no room, though its prefix was looked up to the first key that is `missing`.

    It is remembered, so that a found prefix of any length is not looked up in every step, nor all who wait ranked.
    """

    sequence: Sequence
    num_returned: int  # how often the pool had been given pages back
    missing: Key | None
    until: float


class _Plan(NamedTuple):
    """Where the pages of a sequence will be: those `found` in the cache, and others up to `stop` of `total`."""

    found: list[int]
    placement: Placement
    stop: int
    total: int


class Admission:
    """Admits sequences in the policy's order while slots and memory last.

    One that has no room may be passed by smaller ones that have it, but for a bounded time only (`PASSING_SHARE`): else
    a large request might wait for ever. The same goes for those that run and wait for memory to grow. A sequence that
    waits for pages of its prefix (`PrefixWaits`) is passed over.

    Args:
      growth: promises pages to those that grow.
      preemption: makes way for the most urgent, if admission is optimistic.
      optimistic: promise a sequence the pages of its prompt; else all pages that it may ever need.

    Attributes:
      waiting: in order of arrival.
    """

    def __init__(
        self,
        running: Running,
        placer: Placer,
        policy: Policy,
        tenants: TenantShares,
        forecast: Forecast,
        growth: Growth,
        preemption: Preemption,
        optimistic: bool,
    ) -> None:
        self._running, self._pool, self._placer = running, running.pool, placer
        self._growth, self._preemption = growth, preemption
        self._policy, self._tenants, self._forecast, self._optimistic = policy, tenants, forecast, optimistic
        self.waiting: list[Sequence] = []
        self._waits = PrefixWaits(running, forecast, policy, tenants)
        self._blocked: _Blocked | None = None

    @property
    def blocked(self) -> Sequence | None:
        """The most urgent sequence, if it had no room when it was looked at last."""
        return None if self._blocked is None else self._blocked.sequence

    def waits_for(self, sequence: Sequence) -> Sequence | None:
        """Who computes the pages of a prefix that a sequence waits for."""
        return self._waits.leader_of(sequence)

    def total_pages(self, sequence: Sequence) -> int:
        """Pages that must be there for a sequence to be admitted: all that it may ever need, or its prompt's."""
        # All that it may ever compute, or only what it has to before it can sample.
        reach = sequence.prompt_length + sequence.max_tokens - 1
        return self._running.pages_of(min(sequence.length, reach) if self._optimistic else reach)

    def check(self, prompt_length: int, max_tokens: int) -> None:
        """Check that a request could be admitted by an empty engine.

        Raises:
          ValueError: the pool is too small for one of its completions.
        """
        pool, pages = self._pool, self._running.pages_of(prompt_length + max_tokens - 1)
        need, ranks = Need(0, pages, (0,) * pool.num_ranks, None), [pool.per_rank] * pool.num_ranks
        fits = pages <= pool.num_pages if self._placer.grows else self._placer.place(0, need, ranks) is not None
        if not fits:
            raise ValueError(
                f"prompt and max_tokens need {pages} pages of {self._running.page_size} tokens, "
                f"more than the {pool.num_pages} that the engine has"
                + (f", {pool.per_rank} on each rank" if pool.num_ranks > 1 else "")
            )

    def add(self, sequence: Sequence) -> None:
        """Let a new or preempted sequence wait."""
        bisect.insort(self.waiting, sequence, key=arrival_order)
        self._blocked = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that waits no more."""
        self.waiting.remove(sequence)
        self._waits.forget(sequence)
        self._blocked = None

    def admit(self, batch: Batch, now: float) -> None:
        """Admit whoever can be. `batch.blocked` has those that run and wait for memory; who waits is added to them."""
        slots = self._running.slots
        if not self.waiting or not (slots.free or (self._optimistic and not slots.resting)):
            return
        if not self._waits.end(now) and self._is_blocked(now):
            return
        self._blocked = None
        growing = [self._order(sequence, now) for sequence in batch.blocked if not self._may_be_passed(sequence, now)]
        passed_over, blocked = 0, list[Sequence]()
        for sequence in self._by_urgency(now):
            if passed_over == _PASSED_OVER or len(blocked) == _LOOKED_AT or sequence.in_flight:
                break
            if growing and min(growing) < self._order(sequence, now):
                break
            if not slots.free:
                if not blocked:
                    self._make_way(batch, sequence, now, needs_slot=True)
                if not slots.free:
                    break
            shared, plan = list[int](), None
            if not (blocked and self._is_too_large(sequence)):
                shared = find_prefix(self._pool, sequence, self._running.page_size)
                if self._waits.begin(sequence, len(shared), now):
                    passed_over += 1
                    continue
                plan = self._plan(sequence, shared)
                if plan is None and not blocked and self._make_way(batch, sequence, now):
                    shared = find_prefix(self._pool, sequence, self._running.page_size)
                    plan = self._plan(sequence, shared)
            if plan is not None:
                self._admit(batch, sequence, plan, len(shared), now)
                order = self._order(sequence, now)
                for other in (*(s for s in batch.blocked if self._order(s, now) < order), *blocked):
                    other.passed_by += 1
                continue
            if not blocked:
                self._remember_blocked(sequence, len(shared), now)
            blocked.append(sequence)
            if sequence.blocked_since is None:
                sequence.blocked_since = now
            if not self._may_be_passed(sequence, now):
                break
        batch.blocked += blocked[:1]

    def _make_way(self, batch: Batch, sequence: Sequence, now: float, needs_slot: bool = False) -> bool:
        """Preempt prompts for the most urgent sequence; it may have to wait for the slot until it has rested."""
        if not self._optimistic:
            return False

        def fits(victims: Collection[Sequence]) -> bool:
            shared = find_prefix(self._pool, sequence, self._running.page_size)
            return self._plan(sequence, shared, victims) is not None

        done = self._preemption.make_way(sequence, now, fits, spared=batch.admitted)
        self._running.slots.wake(batch.index)
        if needs_slot and not self._running.slots.free:
            self._remember_blocked(sequence, len(sequence.keys), now)
        return done

    def _remember_blocked(self, sequence: Sequence, found: int, now: float) -> None:
        missing = sequence.keys[found] if found < len(sequence.keys) else None
        self._blocked = _Blocked(sequence, self._pool.num_returned, missing, now + _RANKED_AGAIN)

    def _order(self, sequence: Sequence, now: float) -> tuple[int, float]:
        return -sequence.priority, self._policy.urgency(sequence, now)

    def _may_be_passed(self, sequence: Sequence, now: float) -> bool:
        """Whether less urgent ones may be admitted before a sequence that has no room."""
        since = sequence.blocked_since
        return since is None or now - since <= PASSING_SHARE * sequence.ttft_budget

    def _is_too_large(self, sequence: Sequence) -> bool:
        """Whether a sequence has no room, as far as that is known without looking its prefix up."""
        if self._placer.grows:
            return False
        cached = sequence.prefix_hit_tokens // self._running.page_size
        return self.total_pages(sequence) - cached - 1 > self._pool.num_available

    def _by_urgency(self, now: float) -> Iterator[Sequence]:
        """Whoever may be admitted next, first."""
        return by_urgency(self._policy, self._waits.others(self.waiting), now, self._tenants)

    def _is_blocked(self, now: float) -> bool:
        """Whether the most urgent sequence had no room and nothing has changed since that might give it some."""
        blocked, pool = self._blocked, self._pool
        if blocked is None or blocked.num_returned != pool.num_returned:
            return False
        if blocked.missing is not None and pool.find(blocked.missing) is not None:
            return False
        if now > blocked.until:  # with time another one may have become the most urgent, or others may give way
            blocked.until = now + _RANKED_AGAIN
            return not self._optimistic and next(self._by_urgency(now)) is blocked.sequence
        return True

    def _plan(self, sequence: Sequence, shared: list[int], without: Collection[Sequence] = ()) -> _Plan | None:
        """Where the pages of a sequence would be if some others were preempted; None if there is not enough memory."""
        total = self.total_pages(sequence)
        partial = self._find_partial_page(sequence, len(shared))
        found = shared if partial is None else [*shared, partial]
        plan = self._place(sequence, found, total, without)
        if plan is None and not self._running:
            # Nobody will give memory back: the pages that were found lie where the rest has no room.
            plan = self._place(sequence, [], total, without)
        return plan

    def _admit(self, batch: Batch, sequence: Sequence, plan: _Plan, num_shared: int, now: float) -> None:
        found, placement, stop, total = plan
        num_shared = min(num_shared, len(found))
        self._running.begin_prefill(sequence, found, placement, stop, total)
        sequence.registered = num_shared
        sequence.computed = num_shared * self._running.page_size
        if len(found) > num_shared and sequence.partial_page is not None:
            self._pool.forget(found[-1])  # it is written to from now on
            sequence.computed += sequence.partial_page.tokens
        sequence.cached = sequence.computed if sequence.cached is None else sequence.cached
        lost = max(0, sequence.lost - sequence.computed)
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

    def _place(self, sequence: Sequence, found: list[int], total: int, without: Collection[Sequence]) -> _Plan | None:
        """The placement of its pages from those that were found on, all or as far as it is promised them at once."""
        pool = self._pool
        available, held, shared = pool.by_rank, [0] * pool.num_ranks, 0
        for other in without:
            given = zip(pool.alone(other.order), other.reserved, strict=True)
            available = [pages + sum(more) for pages, more in zip(available, given, strict=True)]
        for page in found:
            rank, is_alone = pool.rank_of(page), pool.is_held_alone(page)
            held[rank] += 1
            shared += is_alone
            available[rank] -= pool.is_idle(page) or (is_alone and bool(without))
        if min(available) < 0:
            return None  # idle pages that were found may be promised to others
        if self._optimistic:
            # Nothing is promised to decodes: running sequences shall not be preempted at once for a new one.
            for other in self._running:
                if other not in without:
                    assert other.placement is not None
                    available[other.placement.rank(len(other.pages))] -= 1
        need = Need(len(found), total, tuple(held), pool.rank_of(found[-1]) if found else None)
        if self._placer.grows:
            return self._begin_growth(sequence, found, need, available, shared, without)
        placement = self._placer.place(sequence.order, need, [max(0, pages) for pages in available])
        return None if placement is None else _Plan(found, placement, total, total)

    def _begin_growth(
        self,
        sequence: Sequence,
        found: list[int],
        need: Need,
        available: list[int],
        shared: int,
        without: Collection[Sequence],
    ) -> _Plan | None:
        """The first pages of a sequence that grows: all, or if they are more than its limit, those of one rank."""
        rest, limit = need.stop - need.first, self._growth.limit(sequence)
        # A prompt of which one token is left could compute nothing if it had to wait for the rest.
        first = min(rest, limit) if sequence.length - need.first * self._running.page_size > 1 else rest
        free = sum(available) - self._pool.promised
        if self._growth.grantable(sequence, rest, free, shared, without) < first:
            return None
        placement, number, held, last = Grown(self._pool.num_ranks), need.first, list(need.held), need.last
        if not first:
            assert last is not None
            placement.grow(number, last)
        while number < need.first + first:
            here = Need(number, need.first + first, tuple(held), last)
            run = self._placer.next_run(here, available, self._growth.rank_load, limit)
            assert run is not None, "pages that are available are on no rank"
            last, count = run
            placement.grow(number, last)
            held[last] += count
            available[last] -= count
            number += count
            if rest > first:
                break
        return _Plan(found, placement, number, need.stop)

    def _find_partial_page(self, sequence: Sequence, num_full: int) -> int | None:
        """The partial page of its session, if all pages before it were found. Whoever holds it hides it from others."""
        page = sequence.partial_page
        if (
            page is None
            or not sequence.may_share
            or num_full != page.number
            or num_full * self._running.page_size + page.tokens >= sequence.length
        ):
            return None
        return self._pool.find(page.key)
