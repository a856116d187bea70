"""Pages that leave the devices, on their way to host memory."""

import threading
from collections.abc import Callable, Sequence

from longctx.serving.kv_cache.connector import PageRead, PageStore
from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.host_memory import HostPage, HostTier, PageName
from longctx.serving.kv_cache.tiers.loader import Workers
from longctx.serving.kv_cache.tiers.page_file import PageChecksum
from longctx.serving.kv_cache.tiers.parts import copy_pages
from longctx.serving.kv_cache.tiers.stats import TierStats


class StoreQueue:
    """Pages on their way from the devices into host memory, at most `queue_bytes` of them; more are dropped.

    `lock` guards the tiers and the counters. All methods but `close` are called under the lock, and wait for nothing.
    """

    def __init__(
        self,
        lock: threading.Condition,
        part: PageSlice,
        checksum: PageChecksum,
        host: HostTier,
        stats: TierStats,
        queue_bytes: int,
        is_there: Callable[[Key], bool],
        keep: Callable[[HostPage, int], bool],
    ) -> None:
        """`keep(page, checksum)` lets a complete page be found; False: another one with its key is there already."""
        self._lock, self._part, self._checksum, self._host = lock, part, checksum, host
        self._stats, self._is_there, self._keep = stats, is_there, keep
        self._most = queue_bytes // host.memory.page_bytes
        self._arriving: dict[Key, PageRead] = {}
        self._workers = Workers(1, "kv-store")

    @property
    def num_pages(self) -> int:
        """Pages on their way."""
        return len(self._arriving)

    def wanted(self, stores: Sequence[PageStore]) -> list[PageStore]:
        """Pages that are neither there nor on their way, as many as may come."""
        missing = {
            store.key: store for store in stores if store.key not in self._arriving and not self._is_there(store.key)
        }
        room = max(0, self._most - len(self._arriving))
        self._stats.host.dropped += max(0, len(missing) - room)
        return list(missing.values())[:room]

    def put(self, stores: Sequence[PageStore], read: PageRead) -> None:
        """Wait for pages in another thread, and keep those that are wanted."""
        keys = {store.key for store in self.wanted(stores)}
        if keys:
            self._arriving.update(dict.fromkeys(keys, read))
            self._workers.submit(lambda: self._store(stores, keys, read))

    def forget(self, key: Key) -> None:
        """Don't keep a page that is on its way."""
        self._arriving.pop(key, None)

    def clear(self) -> None:
        """Keep no page that is on its way."""
        self._arriving.clear()

    def close(self, timeout: float) -> None:
        """End when all pages have come. It is called without the lock."""
        self._workers.close(timeout)

    def _store(self, stores: Sequence[PageStore], keys: set[Key], read: PageRead) -> None:
        pages: list[HostPage | None] = [None] * len(stores)
        sums: list[int | None] = [None] * len(stores)
        try:
            blocks = read.result()
            with self._lock:
                for row, store in enumerate(stores):
                    if store.key in keys and self._arriving.get(store.key) is read:
                        pages[row] = self._host.reserve(PageName(store.key, store.parent, store.number))
            memory = self._host.memory
            outs = [None if page is None else memory.pages[page.slot] for page in pages]
            complete = copy_pages(blocks, outs, self._part)
            for row, page in enumerate(pages):
                if page is not None and complete[row]:
                    sums[row] = self._checksum(page.name.key, self._part, memory.buffer(page.slot))
        except Exception as error:
            with self._lock:
                self._stats.host.failed += 1
                self._stats.last_error = str(error) or repr(error)
        finally:
            with self._lock:
                for store, page, checksum in zip(stores, pages, sums, strict=True):
                    self._finish(store.key, page, checksum, store.key in keys, read)
                self._lock.notify_all()

    def _finish(self, key: Key, page: HostPage | None, checksum: int | None, is_kept: bool, read: PageRead) -> None:
        """Let a page be found, if it has come whole and has not been forgotten meanwhile."""
        is_wanted = is_kept and self._arriving.get(key) is read
        if is_wanted:
            del self._arriving[key]
            if page is not None and checksum is not None and self._keep(page, checksum):
                self._stats.host.stored += 1
                self._stats.host.bytes_written += self._host.memory.page_bytes
            else:
                self._stats.host.dropped += 1
        if page is not None:
            self._host.release(page)
