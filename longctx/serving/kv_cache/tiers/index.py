"""Base of tiers: pages by key, the rules by which one is evicted when room is needed, listeners to both, counters.

No clock, no thread: everything follows from the calls.

Source: Mooncake, section 3 (LRU, LFU, or by the requests' characteristics).
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from longctx.serving.kv_cache.page_pool import Key


class PageName(NamedTuple):
    """Which page one is: its key, the key before it (empty: none or not known), its number in its sequence."""

    key: Key
    parent: Key = b""
    number: int = 0


class TierPage:
    """Page of a tier.

    Attributes:
      name: which page it is. size: its bytes in the tier.
      uses: how often it was used. tick: when last, in uses of the tier. holds: how many read or write it now.
      is_cut_off: whether something before it in its chain is missing, so that the tier alone has no use for it.
    """

    __slots__ = ("holds", "is_cut_off", "is_pinned", "name", "size", "tick", "uses")

    def __init__(self, name: PageName, size: int) -> None:
        self.name, self.size = name, size
        self.uses = self.tick = self.holds = 0
        self.is_cut_off = self.is_pinned = False


Page = TypeVar("Page", bound=TierPage)

EVICTION: dict[str, Callable[[TierPage], tuple[int, ...]]] = {
    "lru": lambda page: (page.tick,),
    "lfu": lambda page: (page.uses, page.tick),
    "length": lambda page: (page.uses, -page.name.number, page.tick),
}
"""Ranks of pages by the rule's name; the lowest goes first, after those that are cut off.

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


class TierIndex(Generic[Page]):
    """The pages of a tier that can be found, by key.

    A page may go unless it is held, pinned, or followed by another of its chain. Without its beginning a chain is of
    no use: so chains go from their tails, and what is cut off from its beginning goes first, under every rule.

    Args:
      tier: that listeners are told.

    Attributes:
      capacity: bytes. used, pinned: bytes that pages have, and that pinned ones have.
      num_evicted: pages that went to make room.
    """

    def __init__(self, tier: str, capacity: int, eviction: str = "lru") -> None:
        self.tier, self.capacity = tier, capacity
        self.used = self.pinned = self.num_evicted = 0
        self._rank, self._listener = EVICTION[eviction], list[TierListener]()
        self._pages: dict[Key, Page] = {}
        self._followers: dict[Key, dict[Key, None]] = {}  # pages after one, which is there or not
        self._heap: list[tuple[tuple[int, ...], int, Key]] = []  # those that may go; outdated items are skipped
        self._serial_of: dict[Key, int] = {}  # of the items that are not outdated
        self._serial = self._tick = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: object) -> bool:
        return key in self._pages

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    @property
    def max_pinned(self) -> int:
        """Bytes of pages that may be pinned, at most."""
        return self.capacity // 2

    def find(self, key: Key) -> Page | None:
        return self._pages.get(key)

    def listen(self, listener: TierListener) -> None:
        """Tell a listener of all pages that can be found, and of changes from now on."""
        self._listener = [listener]
        for page in self._pages.values():
            listener.stored(self.tier, page.name.key, page.name.parent)

    def add(self, page: Page) -> None:
        """Let a page be found for which there is room."""
        key, parent, _ = page.name
        assert key not in self._pages, f"{key!r} is there already"
        assert self.has_room(page.size), f"no room for {page.size} bytes"
        self._pages[key] = page
        self.used += page.size
        page.tick = self._next_tick()
        if parent:
            self._followers.setdefault(parent, {})[key] = None
            self._serial_of.pop(parent, None)
        page.is_cut_off = self._lacks_beginning(page)
        self._settle(page)
        self._tell_followers(key)
        for listener in self._listener:
            listener.stored(self.tier, key, parent)

    def use(self, page: Page) -> None:
        """Note that a page has been used."""
        page.uses += 1
        page.tick = self._next_tick()
        self._settle(page)

    def hold(self, page: Page) -> None:
        """Keep a page until it is released as often as it was held."""
        page.holds += 1
        self._settle(page)

    def release(self, page: Page) -> None:
        assert page.holds > 0, f"{page.name!r} is not held"
        page.holds -= 1
        self._settle(page)

    def pin(self, key: Key) -> bool:
        """Keep a page until it is unpinned; False if it isn't there, or too much is pinned already."""
        page = self.find(key)
        if page is not None and not page.is_pinned and self.pinned + page.size <= self.max_pinned:
            self.pinned += page.size
            page.is_pinned = True
            self._settle(page)
        return page is not None and page.is_pinned

    def unpin(self, key: Key) -> None:
        """Let a page go when its turn comes."""
        page = self.find(key)
        if page is not None and page.is_pinned:
            self.pinned -= page.size
            page.is_pinned = False
            self._settle(page)

    def evict(self) -> Page | None:
        """Remove and return the coldest page that may go; None if there is none."""
        while self._heap:
            _, serial, key = self._heap[0]
            if self._serial_of.get(key) == serial:
                page = self._pages[key]
                self.remove(page)
                self.num_evicted += 1
                return page
            heapq.heappop(self._heap)
        return None

    def make_room(self, size: int) -> list[Page]:
        """Remove pages until `size` bytes are free, or nothing more may go; which ones."""
        evicted = []
        while not self.has_room(size) and (page := self.evict()) is not None:
            evicted.append(page)
        return evicted

    def has_room(self, size: int) -> bool:
        return self.used + size <= self.capacity

    def remove(self, page: Page) -> None:
        """Let a page be found no more, even if it is held."""
        key, parent, _ = page.name
        del self._pages[key]
        self._serial_of.pop(key, None)
        self.used -= page.size
        self.pinned -= page.size * page.is_pinned
        if parent:
            del self._followers[parent][key]
            if not self._followers[parent]:
                del self._followers[parent]
                if (before := self.find(parent)) is not None:
                    self._settle(before)
        self._tell_followers(key)
        for listener in self._listener:
            listener.removed(self.tier, key)

    def _lacks_beginning(self, page: Page) -> bool:
        before = self.find(page.name.parent)
        return page.name.parent != b"" and (before is None or before.is_cut_off)

    def _tell_followers(self, key: Key) -> None:
        """A page has come or gone: what follows it is cut off, or is not any more."""
        changed = list(self._followers.get(key, ()))
        while changed:
            page = self._pages[changed.pop()]
            if page.is_cut_off != self._lacks_beginning(page):
                page.is_cut_off = not page.is_cut_off
                self._settle(page)
                changed += self._followers.get(page.name.key, ())

    def _settle(self, page: Page) -> None:
        """Put a page among those that may go, where its use ranks it, if it may."""
        key = page.name.key
        if self.find(key) is not page:
            return
        self._serial_of.pop(key, None)
        if page.holds or page.is_pinned or key in self._followers:
            return
        self._serial += 1
        self._serial_of[key] = self._serial
        heapq.heappush(self._heap, ((not page.is_cut_off, *self._rank(page)), self._serial, key))
        if len(self._heap) > 2 * len(self._serial_of) + 64:
            self._heap = [item for item in self._heap if self._serial_of.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


@dataclass
class TierCounters:
    """Counters of one tier. All count pages from the start on, unless said otherwise.

    Attributes:
      hits, misses: pages of loads that it had and that came whole, and that it was asked for and had not.
      stored, evicted: pages written to it, and removed for room.
      dropped: pages that were not written, as its queue or its memory was full, or the write failed.
      corrupt: pages that were there, and were not what had been written; files that were unusable at start.
      failed: writes that raised an error.
      bytes_read, bytes_written: bytes.
      pages, num_bytes, pinned_bytes: that it has now.
      capacity: bytes that it may have now: fewer than it was made with while the volume of its files is full.
      is_failing: whether the last write raised an error.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    corrupt: int = 0
    failed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    pages: int = 0
    num_bytes: int = 0
    pinned_bytes: int = 0
    capacity: int = 0
    is_failing: bool = False


@dataclass
class TierStats:
    """Counters of all tiers.

    Attributes:
      host, disk, remote: of each tier.
      waiting_bytes: of pages that are on their way from devices, or to the disk.
    """

    host: TierCounters = field(default_factory=TierCounters)
    disk: TierCounters = field(default_factory=TierCounters)
    remote: TierCounters = field(default_factory=TierCounters)
    waiting_bytes: int = 0
