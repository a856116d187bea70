"""Which waiting sequences get a slot and pages, and when."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.scheduler.batch import Batch, TableRun
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.growth import Growth
from longctx.serving.scheduler.page_planner import PagePlan, PagePlanner
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


class Admission:
    """Admits sequences in the policy's order while slots and memory last.

    One that has no room may be passed by smaller ones that have it, but for a bounded time only (`PASSING_SHARE`): else
    a large request might wait for ever. The same goes for those that run and wait for memory to grow. A sequence that
    waits for pages of its prefix (`PrefixWaits`) is passed over.

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
        policy: Policy,
        tenants: TenantShares,
        forecast: Forecast,
        growth: Growth,
        preemption: Preemption,
        optimistic: bool,
    ) -> None:
        self._running, self._pool, self._planner = running, running.pool, planner
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
        self._admit_waiting(batch, now)
        if self._blocked is not None:  # found in this step, or before, and nothing has changed since
            batch.blocked.append(self._blocked.sequence)

    def _admit_waiting(self, batch: Batch, now: float) -> None:
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
                    self._free_slot(batch, sequence, now)
                if not slots.free:
                    break
            shared, plan = list[int](), None
            if not (blocked and self._is_too_large(sequence)):
                shared = find_prefix(self._pool, sequence, self._running.page_size)
                if self._waits.begin(sequence, len(shared), now):
                    passed_over += 1
                    continue
                plan = self._planner.plan(sequence, shared)
                if plan is None and not blocked:
                    plan = self._make_way(batch, sequence, shared, now)
            if plan is not None:
                self._admit(batch, sequence, plan, now)
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
        cached = sequence.prefix_hit_tokens // self._running.page_size
        return self._planner.least_pages(sequence) - cached - 1 > self._pool.num_available

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

    def _admit(self, batch: Batch, sequence: Sequence, plan: PagePlan, now: float) -> None:
        found, page_size = plan.found, self._running.page_size
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
