"""Sequences that wait for a prefix which another is computing, so that a burst of equal prefixes computes it once."""

import math
from dataclasses import dataclass

from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.policy import Policy, TenantShares
from longctx.serving.scheduler.running import Running
from longctx.serving.scheduler.sequence import Sequence, State


def find_prefix(pool: PagePool, sequence: Sequence, page_size: int) -> list[int]:
    """The pages of its longest prefix that is in the cache; at least one token is left to compute."""
    pages: list[int] = []
    if sequence.may_share:
        for key in sequence.keys[: (sequence.length - 1) // page_size]:
            page = pool.find(key)
            if page is None:
                break
            pages.append(page)
    return pages


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

    def leader_of(self, sequence: Sequence) -> Sequence | None:
        """Whom a sequence waits for now."""
        leader = self._leader_of.get(sequence)
        waits = leader is not None and leader in self._leaders and sequence in self._leaders[leader].waiting
        return leader if waits else None

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
        alone = self._forecast.prefill_seconds(found * size, pages * size, sequence.tpot_target)
        there = min(other.computed, pages * size)
        if self._forecast.prefill_seconds(there, pages * size, other.tpot_target) > alone:
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
