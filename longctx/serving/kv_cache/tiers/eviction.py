"""Which entry of a tier goes first when room is needed: rules, by name.

Source: Mooncake, section 3 (LRU, LFU, or by the requests' characteristics).
"""

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Use:
    """How an entry has been used.

    Attributes:
      number: its place in its chain of pages.
      uses: how often it was used. tick: when last, in uses of the tier.
      is_cut_off: whether something before it in its chain is missing, so that the tier alone has no use for it.
    """

    __slots__ = ("is_cut_off", "number", "tick", "uses")

    def __init__(self, number: int, tick: int) -> None:
        self.number, self.tick, self.uses, self.is_cut_off = number, tick, 0, False


def _lru(use: Use) -> tuple[int, ...]:
    return (use.tick,)


def _lfu(use: Use) -> tuple[int, ...]:
    return use.uses, use.tick


def _length_aware(use: Use) -> tuple[int, ...]:
    return use.uses, -use.number, use.tick


EVICTION: dict[str, Callable[[Use], tuple[int, ...]]] = {"lru": _lru, "lfu": _lfu, "length": _length_aware}
"""Ranks of entries by the rule's name; the lowest goes first, after those that are cut off.

  lru: least recently used. lfu: least often used, then least recently.
  length: least often used, then furthest from the beginning of its chain.
"""


def check_eviction(name: str) -> str:
    """ValueError, unless there is a rule of that name."""
    if name not in EVICTION:
        raise ValueError(f"eviction must be one of {', '.join(EVICTION)}, got {name!r}")
    return name


class EvictionOrder(Generic[Name]):
    """Entries that may go, coldest first: a heap whose outdated items are skipped."""

    def __init__(self, eviction: str) -> None:
        self._rank = EVICTION[check_eviction(eviction)]
        self._heap: list[tuple[tuple[int, ...], int, Name]] = []
        self._serial_of: dict[Name, int] = {}
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._serial_of)

    def __contains__(self, name: object) -> bool:
        return name in self._serial_of

    def add(self, name: Name, use: Use) -> None:
        """Put an entry where its use ranks it; one that is there already moves."""
        serial = self._serial_of[name] = next(self._serials)
        heapq.heappush(self._heap, ((not use.is_cut_off, *self._rank(use)), serial, name))
        if len(self._heap) > 2 * len(self._serial_of) + 64:
            self._heap = [item for item in self._heap if self._is_current(item)]
            heapq.heapify(self._heap)

    def discard(self, name: Name) -> None:
        """Take an entry out, if it is there."""
        self._serial_of.pop(name, None)

    def coldest(self) -> Name | None:
        """The entry that goes first; None if there is none. It stays."""
        while self._heap:
            if self._is_current(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None

    def _is_current(self, item: tuple[tuple[int, ...], int, Name]) -> bool:
        return self._serial_of.get(item[2]) == item[1]
