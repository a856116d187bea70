"""Sequences that wait for a prefix which another is computing, so that a burst of equal prefixes computes it once."""

from dataclasses import dataclass

from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.scheduler.forecast import Forecast
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


@dataclass
class _Wait:
    """For `other` to register as many pages as both begin with, each in `seconds_per_page`, until `until` at most."""

    other: Sequence
    pages: int
    seconds_per_page: float
    registered: int
    until: float

    def ends(self) -> bool:
        """Whether the pages are there, or will not come."""
        return self.other.state is not State.PREFILLING or self.other.registered >= self.pages

    def takes_too_long(self, now: float) -> bool:
        if self.other.registered != self.registered:
            self.registered = self.other.registered
            self.until = now + (self.pages - self.registered) * self.seconds_per_page
        return now > self.until


class PrefixWaits:
    """Who waits for whose pages, and for how long.

    A sequence whose next page another one is computing waits for all pages that both begin with, if these are
    predicted to be there sooner than it could compute them itself; and no longer than that without progress.
    """

    def __init__(self, running: Running, forecast: Forecast) -> None:
        self._running, self._forecast = running, forecast
        self._waits: dict[Sequence, _Wait] = {}
        self._given_up: dict[Sequence, _Wait] = {}

    def end(self, now: float) -> bool:
        """End the waits that are over; whether there was one."""
        before = len(self._waits)
        for sequence, wait in list(self._waits.items()):
            if wait.ends():
                del self._waits[sequence]
                sequence.prefix_hit_tokens = min(wait.other.registered, wait.pages) * self._running.page_size
                self._forecast.update(sequence)
            elif wait.takes_too_long(now):
                self._given_up[sequence] = self._waits.pop(sequence)
        return len(self._waits) < before

    def others(self, waiting: list[Sequence]) -> list[Sequence]:
        """The sequences that wait for no prefix."""
        return [s for s in waiting if s not in self._waits] if self._waits else waiting

    def forget(self, sequence: Sequence) -> None:
        """It has been admitted, or has ended."""
        self._waits.pop(sequence, None)
        self._given_up.pop(sequence, None)

    def begin(self, sequence: Sequence, found: int, now: float) -> bool:
        """Whether a sequence of which `found` pages are in the cache waits for more."""
        size = self._running.page_size
        usable = min(len(sequence.keys), (sequence.length - 1) // size)
        if not sequence.may_share or found >= usable:
            return False
        other = self._computing(sequence.keys[found], found)
        before = self._given_up.get(sequence)
        if other is None or (before is not None and before.other is other and before.registered == other.registered):
            return False
        pages = min(usable, _common(sequence, other, found + 1))
        alone = self._forecast.prefill_seconds(found * size, pages * size)
        if self._forecast.prefill_seconds(min(other.computed, pages * size), pages * size) > alone:
            return False
        self._waits[sequence] = _Wait(other, pages, alone / (pages - found), other.registered, now + alone)
        return True

    def _computing(self, key: object, number: int) -> Sequence | None:
        """Who computes the page of this key and number next."""
        return next((s for s in self._running.prefilling if s.registered == number and _key(s, number) == key), None)


def _key(sequence: Sequence, number: int) -> object:
    return sequence.keys[number] if number < len(sequence.keys) else None


def _common(one: Sequence, other: Sequence, low: int) -> int:
    """How many pages both begin with, `low` at least: a key stands for all pages before it, so bisection finds it."""
    high = min(len(one.keys), len(other.keys))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.keys[middle - 1] == other.keys[middle - 1] else (low, middle - 1)
    return low
