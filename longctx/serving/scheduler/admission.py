"""Which waiting sequences get a slot and pages, and when."""

import bisect
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.placement import Need, Placement, Placer
from longctx.serving.scheduler.batch import Batch, TableRun
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.policy import Policy, by_urgency, relative_slack
from longctx.serving.scheduler.prefix_wait import PrefixWaits, find_prefix
from longctx.serving.scheduler.running import Running, arrival_order
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.tenants import TenantShares

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

    Nobody overtakes a sequence that waits for memory: else a large request might wait for ever. A sequence that waits
    for pages of its prefix (`PrefixWaits`) is passed over.

    Args:
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
        optimistic: bool,
    ) -> None:
        self._running, self._pool, self._placer = running, running.pool, placer
        self._policy, self._tenants, self._forecast, self._optimistic = policy, tenants, forecast, optimistic
        self.waiting: list[Sequence] = []
        self._waits = PrefixWaits(running, forecast, policy, tenants)
        self._blocked: _Blocked | None = None
        self._load: list[float] | None = None  # seconds of prompts on each rank, while sequences are admitted

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
        need = Need(0, pages, (0,) * pool.num_ranks, None)
        if self._placer.place(0, need, [pool.per_rank] * pool.num_ranks, [0.0] * pool.num_ranks) is None:
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
        """Admit whoever can be."""
        if not self.waiting or not self._running.slots.free:
            return
        if not self._waits.end(now) and self._is_blocked(now):
            return
        self._blocked, self._load = None, None
        passed_over = 0
        for sequence in self._by_urgency(now):
            if passed_over == _PASSED_OVER or not self._running.slots.free or sequence.in_flight:
                return
            shared = find_prefix(self._pool, sequence, self._running.page_size)
            if self._waits.begin(sequence, len(shared), now):
                passed_over += 1
                continue
            if not self._try_to_admit(batch, sequence, shared):
                missing = sequence.keys[len(shared)] if len(shared) < len(sequence.keys) else None
                self._blocked = _Blocked(sequence, self._pool.num_returned, missing, now + _RANKED_AGAIN)
                return
            sequence.slack = relative_slack(sequence, now)
            self.waiting.remove(sequence)
            self._waits.forget(sequence)
            self._tenants.charge(sequence)

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
        if now > blocked.until:  # with time another one may have become the most urgent
            blocked.until = now + _RANKED_AGAIN
            return next(self._by_urgency(now)) is blocked.sequence
        return True

    def _try_to_admit(self, batch: Batch, sequence: Sequence, shared: list[int]) -> bool:
        total = self.total_pages(sequence)
        if total - len(shared) - 1 > self._pool.num_available:
            return False
        partial = self._find_partial_page(sequence, len(shared))
        found = shared if partial is None else [*shared, partial]
        placement = self._place(sequence, found, total)
        if placement is None and not self._running:
            # Nobody will give memory back: the pages that were found lie where the rest has no room.
            shared, partial, found = [], None, []
            placement = self._place(sequence, found, total)
        if placement is None:
            return False

        self._running.begin_prefill(sequence, found, placement, total)
        sequence.registered = len(shared)
        sequence.computed = len(shared) * self._running.page_size
        if partial is not None and sequence.partial_page is not None:
            self._pool.forget(partial)  # it is written to from now on
            sequence.computed += sequence.partial_page.tokens
        sequence.cached = sequence.computed if sequence.cached is None else sequence.cached
        sequence.prefix_hit_tokens = 0  # they are computed now
        self._forecast.update(sequence)
        self._add_load(sequence)
        assert sequence.slot is not None
        if found:
            batch.tables.append(TableRun(sequence.slot, 0, list(found)))
        batch.admitted.append(sequence)
        return True

    def _place(self, sequence: Sequence, found: list[int], total: int) -> Placement | None:
        """The placement of its pages, from those that were found to `total`; None if there is not enough memory now."""
        pool = self._pool
        available = [pool.available(rank) for rank in range(pool.num_ranks)]
        held = [0] * pool.num_ranks
        for page in found:
            held[pool.rank_of(page)] += 1
            available[pool.rank_of(page)] -= pool.is_idle(page)
        if min(available) < 0:
            return None  # idle pages that were found may be promised to others
        if self._optimistic:
            # Nothing is promised to decodes: running sequences shall not be preempted at once for a new one.
            for other in self._running:
                assert other.placement is not None
                available[other.placement.rank(len(other.pages))] -= 1
        if self._load is None:
            self._load = [0.0] * pool.num_ranks
            for other in self._running.prefilling:
                self._add_load(other)
        last = pool.rank_of(found[-1]) if found else None
        need = Need(len(found), total, tuple(held), last)
        return self._placer.place(sequence.order, need, [max(0, pages) for pages in available], self._load)

    def _add_load(self, sequence: Sequence) -> None:
        """Count the rest of a prompt on the ranks that compute its next tokens."""
        if self._load is None or self._pool.num_ranks == 1:
            return
        assert sequence.placement is not None
        ranks: List[int] = sequence.ranks or (sequence.placement.rank(0),)
        if self._forecast.is_sharded(sequence):
            ranks = range(self._pool.num_ranks)
        for i in ranks:
            self._load[i] += sequence.prefill_remaining / len(ranks)

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
