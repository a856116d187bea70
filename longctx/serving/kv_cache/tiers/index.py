"""Index of a tier: its pages, the rules by which one is evicted when room is needed, and listeners to both.

No clock, no thread: everything follows from the calls.

Source: Mooncake, section 3 (LRU, LFU, or by the requests' characteristics).
"""

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar, runtime_checkable

from longctx.serving.kv_cache.page_pool import Key

Name = TypeVar("Name", bound=Hashable)


class Use:
    """Use of an entry.

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


@runtime_checkable
class TierListener(Protocol):
    """Hears of whole pages in host memory (`"host"`) and on disk (`"disk"`), change by change.

    It is called by any thread, under the store's lock: it must be quick, and call no method of the store.
    """

    def stored(self, tier: str, key: Key, parent: Key) -> None:
        """A tier has a page from now on.

        `parent` is the key of the page before it, empty if there is none or it is not known.
        """
        ...

    def removed(self, tier: str, key: Key) -> None:
        """A tier has a page no more."""
        ...


class _Entry(Use):
    """Attributes: size in bytes; the entry before it in its chain; how often it is held; until when it is pinned."""

    __slots__ = ("holds", "parent", "pinned_until", "size")

    def __init__(self, size: int, number: int, parent: object, tick: int) -> None:
        super().__init__(number, tick)
        self.size, self.parent, self.holds = size, parent, 0
        self.pinned_until: float | None = None


class TierIndex(Generic[Name]):
    """Entries of a tier by name: pages of host memory by key, files of a disk by file name.

    An entry may go unless it is held, pinned, or followed by another of its chain. Without its beginning a chain is of
    no use: so chains go from their tails, and what is cut off from its beginning goes first, under every rule.

    Attributes:
      capacity: bytes. used, pinned: bytes that entries have, and that pinned ones have.
      num_evicted: entries that went to make room.
    """

    def __init__(self, capacity: int, eviction: str = "lru", max_pinned: int | None = None) -> None:
        self.capacity = capacity
        self.max_pinned = capacity // 2 if max_pinned is None else max_pinned
        self.used = self.pinned = self.num_evicted = 0
        self._entries: dict[Name, _Entry] = {}
        self._followers: dict[object, dict[Name, None]] = {}  # entries after one, which is there or not
        self._order: EvictionOrder[Name] = EvictionOrder(eviction)
        self._pins: list[tuple[float, int, Name]] = []  # a heap
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[Name]:
        """Return the names of all entries, in the order in which they were added."""
        return list(self._entries)

    def add(self, name: Name, size: int, number: int = 0, parent: Name | None = None) -> None:
        """Add an entry for which there is room: the `number`th of a chain, after `parent`."""
        assert name not in self._entries, f"{name!r} is there already"
        assert self.used + size <= self.capacity, f"no room for {size} bytes"
        self._entries[name] = entry = _Entry(size, number, parent, self._next_tick())
        self.used += size
        if parent is not None:
            self._followers.setdefault(parent, {})[name] = None
            self._order.discard(parent)
        entry.is_cut_off = self._lacks_beginning(entry)
        self._settle(name, entry)
        self._tell_followers(name)

    def use(self, name: Name) -> None:
        """Note that an entry has been used."""
        entry = self._entries[name]
        entry.uses += 1
        entry.tick = self._next_tick()
        self._settle(name, entry)

    def hold(self, name: Name) -> None:
        """Keep an entry until it is released as often as it was held."""
        entry = self._entries[name]
        entry.holds += 1
        self._order.discard(name)

    def release(self, name: Name) -> None:
        entry = self._entries[name]
        assert entry.holds > 0, f"{name!r} is not held"
        entry.holds -= 1
        self._settle(name, entry)

    def pin(self, name: Name, until: float) -> bool:
        """Keep an entry until a time, or longer if it is pinned for longer; False if too much is pinned already."""
        entry = self._entries[name]
        if entry.pinned_until is None:
            if self.pinned + entry.size > self.max_pinned:
                return False
            self.pinned += entry.size
        entry.pinned_until = until if entry.pinned_until is None else max(until, entry.pinned_until)
        self._tick += 1
        heapq.heappush(self._pins, (entry.pinned_until, self._tick, name))
        self._order.discard(name)
        return True

    def unpin(self, name: Name) -> None:
        """Let a pinned entry go when its turn comes."""
        entry = self._entries[name]
        if entry.pinned_until is not None:
            self.pinned -= entry.size
            entry.pinned_until = None
            self._settle(name, entry)

    def expire(self, now: float) -> None:
        """End pins whose time has come."""
        while self._pins and self._pins[0][0] <= now:
            _, _, name = heapq.heappop(self._pins)
            entry = self._entries.get(name)
            if entry is not None and entry.pinned_until is not None and entry.pinned_until <= now:
                self.unpin(name)

    def evict(self) -> Name | None:
        """Remove the coldest entry that may go, and return its name; None if there is none."""
        name = self._order.coldest()
        if name is not None:
            self.remove(name)
            self.num_evicted += 1
        return name

    def make_room(self, size: int) -> list[Name]:
        """Remove entries until `size` bytes are free, or nothing more may go; which ones."""
        evicted = []
        while not self.has_room(size) and (name := self.evict()) is not None:
            evicted.append(name)
        return evicted

    def has_room(self, size: int) -> bool:
        return self.used + size <= self.capacity

    def remove(self, name: Name) -> None:
        """Forget an entry, even if it is held."""
        entry = self._entries.pop(name)
        self._order.discard(name)
        self.used -= entry.size
        if entry.pinned_until is not None:
            self.pinned -= entry.size
        if entry.parent is not None:
            parent: Name = entry.parent  # type: ignore[assignment]
            del self._followers[parent][name]
            if not self._followers[parent]:
                del self._followers[parent]
                if parent in self._entries:
                    self._settle(parent, self._entries[parent])
        self._tell_followers(name)

    def _lacks_beginning(self, entry: _Entry) -> bool:
        before = self._entries.get(entry.parent)  # type: ignore[arg-type]
        return entry.parent is not None and (before is None or before.is_cut_off)

    def _tell_followers(self, name: Name) -> None:
        """An entry has come or gone: what follows it is cut off, or is not any more."""
        changed = list(self._followers.get(name, ()))
        while changed:
            follower = changed.pop()
            entry = self._entries[follower]
            if entry.is_cut_off != self._lacks_beginning(entry):
                entry.is_cut_off = not entry.is_cut_off
                self._settle(follower, entry)
                changed += self._followers.get(follower, ())

    def _settle(self, name: Name, entry: _Entry) -> None:
        """Put an entry among those that may go, if it may."""
        if entry.holds or entry.pinned_until is not None or name in self._followers:
            self._order.discard(name)
        else:
            self._order.add(name, entry)

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick
