"""Host memory for pages: one slab, allocated at once and handed out by page."""

import ctypes
import heapq
import mmap
import os
import threading
from typing import NamedTuple

import numpy as np
import xxhash

from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.index import TierIndex, TierListener

_POPULATE_WRITE = 23  # of madvise, Linux 5.14
_POPULATED_AT_ONCE = 16 << 20  # bytes


class HostMemory:
    """Slots of one page each, in memory that begins at a multiple of the system's page size.

    Free slots are handed out from the lowest on, so that pages which come together mostly lie together. The system
    gives the memory in the background, ahead of its use: a page that is the first to use its memory takes several times
    as long to write.

    Attributes:
      pages: `[slots, layers, 2, page_size, heads, row_size]` in the layout's `bits`.
      page_bytes: of a slot.
    """

    def __init__(self, capacity: int, layout: PageLayout, part: PageSlice) -> None:
        """Allocate as many slots as `capacity` bytes have.

        Raises:
          ValueError: host_bytes is less than a page, or more than the machine's memory.
        """
        shape, self.page_bytes = layout.part_shape(part), layout.part_bytes(part)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if not self.page_bytes <= capacity <= memory:
            raise ValueError(
                f"host_bytes must be from {self.page_bytes:,}, a page, to {memory:,}, this machine's memory, "
                f"got {capacity:,}"
            )
        self.num_slots = capacity // self.page_bytes
        slab = mmap.mmap(-1, self.num_slots * self.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slab.madvise(mmap.MADV_HUGEPAGE)
        self.pages = np.frombuffer(slab, layout.bits).reshape(self.num_slots, *shape)
        self._free = list(range(self.num_slots))  # a heap
        populate = threading.Thread(target=_populate, args=(self.pages,), name="kv-memory", daemon=True)
        populate.start()

    def allocate(self) -> int | None:
        """A free slot; None if there is none."""
        return heapq.heappop(self._free) if self._free else None

    def free(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def buffer(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self.pages[slot].data.cast("B")


def _populate(memory: np.ndarray) -> None:
    """Have the system give memory as if it were written to; its contents stay. Where that fails, first use does it."""
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return
    start, size = memory.ctypes.data, memory.nbytes
    for offset in range(0, size, _POPULATED_AT_ONCE):
        length = min(_POPULATED_AT_ONCE, size - offset)
        if advise(ctypes.c_void_p(start + offset), ctypes.c_size_t(length), ctypes.c_int(_POPULATE_WRITE)):
            return


class PageChecksum:
    """Checksums of a process's part of the pages of one model: right bytes under another page's key are wrong.

    XXH3 finds accidents, at the speed of memory. It is no signature: the processes that may write to a cache are
    trusted.
    """

    def __init__(self, fingerprint: bytes, part: PageSlice) -> None:
        self._of = b"%b %r" % (fingerprint, tuple(part))

    def __call__(self, key: Key, data: memoryview) -> int:
        """Return the checksum, 64 bits, of the contiguous payload of a page."""
        seed = xxhash.xxh3_64_intdigest(b"%d %b %b" % (len(key), key, self._of))
        return xxhash.xxh3_64_intdigest(data, seed=seed)


class PageName(NamedTuple):
    """Which page one is: its key, the key before it (empty: none or not known), its number in its sequence."""

    key: Key
    parent: Key = b""
    number: int = 0


class HostPage:
    """A slot that somebody writes, reads or finds.

    Attributes:
      name: which page it is. slot: where. checksum: of its bytes, once it is complete.
      holds: how many read or write it now.
    """

    __slots__ = ("checksum", "holds", "name", "slot")

    def __init__(self, name: PageName, slot: int) -> None:
        self.name, self.slot, self.checksum, self.holds = name, slot, 0, 1


class HostTier:
    """Pages in host memory: complete ones are found by key, others are known to those who write them only.

    A slot is free again when its page can't be found and has no holder. Not for several threads at once.

    Attributes:
      listener: is told of what can be found, if there is one.
    """

    def __init__(self, memory: HostMemory, eviction: str) -> None:
        self.memory = memory
        self.index: TierIndex[Key] = TierIndex(memory.num_slots * memory.page_bytes, eviction)
        self.listener: TierListener | None = None
        self._pages: dict[Key, HostPage] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def find(self, key: Key) -> HostPage | None:
        """The complete page of a key."""
        return self._pages.get(key)

    def reserve(self, name: PageName) -> HostPage | None:
        """A slot to write a page to, held by the caller; None if every other page is held or pinned."""
        slot = self.memory.allocate()
        if slot is None and (evicted := self.index.evict()) is not None:
            self.memory.free(self._pop(evicted).slot)
            slot = self.memory.allocate()
        return None if slot is None else HostPage(name, slot)

    def commit(self, page: HostPage, checksum: int) -> bool:
        """Let a page be found that is complete; False if another one with its key can be found already."""
        page.checksum = checksum
        key, parent, number = page.name
        if key in self._pages:
            return False
        self._pages[key] = page
        if self.listener is not None:
            self.listener.stored("host", key, parent)
        self.index.add(key, self.memory.page_bytes, number, parent or None)
        for _ in range(page.holds):
            self.index.hold(key)
        return True

    def hold(self, page: HostPage) -> None:
        page.holds += 1
        if self._is_found(page):
            self.index.hold(page.name.key)

    def release(self, page: HostPage) -> None:
        assert page.holds > 0
        page.holds -= 1
        if self._is_found(page):
            self.index.release(page.name.key)
        elif not page.holds:
            self.memory.free(page.slot)

    def forget(self, key: Key) -> None:
        """Let a page be found no more; who holds it may go on."""
        if key in self._pages:
            page = self._pop(key)
            self.index.remove(key)
            if not page.holds:
                self.memory.free(page.slot)

    def listen(self, listener: TierListener) -> None:
        """Tell a listener of all pages that can be found, and of changes from now on."""
        self.listener = listener
        for key, page in self._pages.items():
            listener.stored("host", key, page.name.parent)

    def clear(self) -> int:
        """Forget all pages; how many."""
        keys = list(self._pages)
        for key in keys:
            self.forget(key)
        return len(keys)

    def _pop(self, key: Key) -> HostPage:
        if self.listener is not None:
            self.listener.removed("host", key)
        return self._pages.pop(key)

    def _is_found(self, page: HostPage) -> bool:
        return self._pages.get(page.name.key) is page
