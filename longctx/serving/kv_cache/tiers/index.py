"""Index of a tier: its pages, the rules by which one is evicted when room is needed, and listeners to both.

No clock, no thread: everything follows from the calls.

Source: Mooncake, section 3 (LRU, LFU, or by the requests' characteristics).
"""

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar, runtime_checkable

from longctx.serving.kv_cache.page_pool import Key

Name = TypeVar("Name", bound=Hashable)


class _Entry:
    """Entry of an index.

    Attributes:
      size: bytes. number: its place in its chain of pages. parent: the entry before it in its chain.
      uses: how often it was used. tick: when last, in uses of the tier.
      holds: how often it is held.
      is_cut_off: whether something before it in its chain is missing, so that the tier alone has no use for it.
    """

    __slots__ = ("holds", "is_cut_off", "is_pinned", "number", "parent", "size", "tick", "uses")

    def __init__(self, size: int, number: int, parent: object, tick: int) -> None:
        self.size, self.number, self.parent, self.tick = size, number, parent, tick
        self.uses = self.holds = 0
        self.is_cut_off = self.is_pinned = False


EVICTION: dict[str, Callable[[_Entry], tuple[int, ...]]] = {
    "lru": lambda entry: (entry.tick,),
    "lfu": lambda entry: (entry.uses, entry.tick),
    "length": lambda entry: (entry.uses, -entry.number, entry.tick),
}
"""Ranks of entries by the rule's name; the lowest goes first, after those that are cut off.

  lru: least recently used. lfu: least often used, then least recently.
  length: least often used, then furthest from the beginning of its chain.
"""


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


class TierIndex(Generic[Name]):
    """Entries of a tier by name: pages of host memory and of a disk by key.

    An entry may go unless it is held, pinned, or followed by another of its chain. Without its beginning a chain is of
    no use: so chains go from their tails, and what is cut off from its beginning goes first, under every rule.

    Attributes:
      capacity: bytes. used, pinned: bytes that entries have, and that pinned ones have.
      num_evicted: entries that went to make room.
    """

    def __init__(self, capacity: int, eviction: str = "lru") -> None:
        self.capacity, self.max_pinned = capacity, capacity // 2
        self.used = self.pinned = self.num_evicted = 0
        self._rank = EVICTION[eviction]
        self._entries: dict[Name, _Entry] = {}
        self._followers: dict[object, dict[Name, None]] = {}  # entries after one, which is there or not
        self._heap: list[tuple[tuple[int, ...], int, Name]] = []  # those that may go; outdated items are skipped
        self._serial_of: dict[Name, int] = {}  # of the items that are not outdated
        self._serial = self._tick = 0

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
            self._serial_of.pop(parent, None)
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
        self._serial_of.pop(name, None)

    def release(self, name: Name) -> None:
        entry = self._entries[name]
        assert entry.holds > 0, f"{name!r} is not held"
        entry.holds -= 1
        self._settle(name, entry)

    def pin(self, name: Name) -> bool:
        """Keep an entry until it is unpinned; False if too much is pinned already."""
        entry = self._entries[name]
        if not entry.is_pinned:
            if self.pinned + entry.size > self.max_pinned:
                return False
            self.pinned += entry.size
            entry.is_pinned = True
            self._serial_of.pop(name, None)
        return True

    def unpin(self, name: Name) -> None:
        """Let a pinned entry go when its turn comes."""
        entry = self._entries[name]
        if entry.is_pinned:
            self.pinned -= entry.size
            entry.is_pinned = False
            self._settle(name, entry)

    def evict(self) -> Name | None:
        """Remove the coldest entry that may go, and return its name; None if there is none."""
        while self._heap:
            _, serial, name = self._heap[0]
            if self._serial_of.get(name) == serial:
                self.remove(name)
                self.num_evicted += 1
                return name
            heapq.heappop(self._heap)
        return None

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
        self._serial_of.pop(name, None)
        self.used -= entry.size
        self.pinned -= entry.size * entry.is_pinned
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
        """Put an entry among those that may go, where its use ranks it, if it may."""
        self._serial_of.pop(name, None)
        if entry.holds or entry.is_pinned or name in self._followers:
            return
        self._serial += 1
        self._serial_of[name] = self._serial
        heapq.heappush(self._heap, ((not entry.is_cut_off, *self._rank(entry)), self._serial, name))
        if len(self._heap) > 2 * len(self._serial_of) + 64:
            self._heap = [item for item in self._heap if self._serial_of.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick
