"""Host memory for pages: one slab, allocated at once and handed out by page."""

import ctypes
import heapq
import mmap
import os
import threading

import numpy as np
import xxhash

from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.index import PageName, TierIndex, TierPage

_POPULATE_WRITE = 23  # of madvise, Linux 5.14
_POPULATED_AT_ONCE = 16 << 20  # bytes


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


class HostPage(TierPage):
    """Page in a slot that somebody writes, reads or finds; `checksum` is of its bytes, once it is complete."""

    __slots__ = ("checksum", "slot")

    def __init__(self, name: PageName, slot: int, size: int) -> None:
        super().__init__(name, size)
        self.slot, self.checksum, self.holds = slot, 0, 1


class HostTier(TierIndex[HostPage]):
    """Pages in host memory: complete ones are found by key, others are known to those who write them only.

    A slot of one page is free again when its page can't be found and has no holder. Slots are in memory that begins at
    a multiple of the system's page size, and are handed out from the lowest on, so that pages which come together
    mostly lie together. The system gives the memory in the background, ahead of its use: a page that is the first to
    use its memory takes several times as long to write. Not for several threads at once.

    Attributes:
      pages: `[slots, layers, 2, page_size, heads, row_size]` in the layout's `bits`.
      page_bytes: of a slot.
    """

    def __init__(self, capacity: int, layout: PageLayout, part: PageSlice, eviction: str) -> None:
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
        super().__init__("host", self.num_slots * self.page_bytes, eviction)
        slab = mmap.mmap(-1, self.num_slots * self.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slab.madvise(mmap.MADV_HUGEPAGE)
        self.pages = np.frombuffer(slab, layout.bits).reshape(self.num_slots, *shape)
        self._free = list(range(self.num_slots))  # a heap
        populate = threading.Thread(target=_populate, args=(self.pages,), name="kv-memory", daemon=True)
        populate.start()

    def buffer(self, page: HostPage) -> memoryview:
        """The bytes of a page."""
        return self.pages[page.slot].data.cast("B")

    def reserve(self, name: PageName) -> HostPage | None:
        """A slot to write a page to, held by the caller; None if every other page is held or pinned."""
        if not self._free and self.evict() is None:
            return None
        return HostPage(name, heapq.heappop(self._free), self.page_bytes)

    def commit(self, page: HostPage, checksum: int) -> bool:
        """Let a page be found that is complete; False if another one with its key can be found already."""
        page.checksum = checksum
        if is_new := page.name.key not in self:
            self.add(page)
        return is_new

    def release(self, page: HostPage) -> None:
        super().release(page)
        self._free_unused(page)

    def remove(self, page: HostPage) -> None:
        super().remove(page)
        self._free_unused(page)

    def _free_unused(self, page: HostPage) -> None:
        if not page.holds and self.find(page.name.key) is not page:
            heapq.heappush(self._free, page.slot)


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
