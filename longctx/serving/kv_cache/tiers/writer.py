"""Pages on their way: from the devices into host memory, and from there to the disk and to a remote store.

Each way has a thread and a queue of its own, so that one which hangs delays no other. A queue has a limit; pages beyond
it are dropped.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from longctx.serving.kv_cache.connector import PageRead, PageStore, assemble
from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.host_memory import HostPage, HostTier, PageChecksum
from longctx.serving.kv_cache.tiers.index import PageName, TierCounters, TierStats

logger = logging.getLogger(__name__)

URGENT, IN_THE_BACKGROUND = 0, 1
_LAST = 2
_SECONDS_BETWEEN_LINES = 10.0


class FaultLog:
    """Log lines about something that fails and recovers: one for each change, and none within 10 s of the last."""

    def __init__(self) -> None:
        self._is_told = False
        self._next_line = 0.0

    def note(self, fault: str | None, recovery: str) -> None:
        """Log what fails, or, with None, what has recovered, unless the last line said so."""
        now = time.monotonic()
        if (fault is not None) != self._is_told and now >= self._next_line:
            self._is_told, self._next_line = not self._is_told, now + _SECONDS_BETWEEN_LINES
            logger.warning(recovery if fault is None else fault)


class Workers:
    """Threads with one queue of jobs. A job's exception is logged, and ends that job only."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._serials = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None], urgency: int = URGENT) -> None:
        """Do a job after those that are as urgent, or more."""
        self._jobs.put((urgency, next(self._serials), job))

    def close(self, timeout: float) -> None:
        """End when all jobs are done; wait at most `timeout` seconds."""
        for _ in self._threads:
            self._jobs.put((_LAST, next(self._serials), None))
        for thread in self._threads:
            thread.join(timeout)

    def _work(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            try:
                job()
            except Exception:
                logger.exception("a job of %s failed", threading.current_thread().name)


class StoreQueue:
    """Pages on their way from the devices into host memory, at most `most_pages` of them; more are dropped.

    `lock` guards the tiers and the counters. All methods but `close` are called under the lock, and wait for nothing.
    """

    def __init__(
        self,
        lock: threading.Condition,
        part: PageSlice,
        checksum: PageChecksum,
        host: HostTier,
        stats: TierStats,
        most_pages: int,
        is_there: Callable[[Key], bool],
        keep: Callable[[HostPage, int], bool],
    ) -> None:
        """`keep(page, checksum)` lets a complete page be found; False: another one with its key is there already."""
        self._lock, self._part, self._checksum, self._host = lock, part, checksum, host
        self._stats, self._is_there, self._keep = stats, is_there, keep
        self._most = most_pages
        self._arriving: set[Key] = set()
        self._workers = Workers(1, "kv-store")

    def __len__(self) -> int:
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
            self._arriving |= keys
            self._workers.submit(lambda: self._store(stores, keys, read))

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
                    if store.key in keys:
                        pages[row] = self._host.reserve(PageName(store.key, store.parent, store.number))
            outs = [None if page is None else self._host.pages[page.slot] for page in pages]
            complete = assemble(blocks, outs, self._part)
            for row, page in enumerate(pages):
                if page is not None and complete[row]:
                    sums[row] = self._checksum(page.name.key, self._host.buffer(page))
        except Exception:
            logger.exception("%d pages can't be read from the devices", len(keys))
            with self._lock:
                self._stats.host.failed += 1
        finally:
            with self._lock:
                for store, page, checksum in zip(stores, pages, sums, strict=True):
                    if store.key in keys:
                        self._arriving.discard(store.key)
                        is_kept = page is not None and checksum is not None and self._keep(page, checksum)
                        self._stats.host.stored += is_kept
                        self._stats.host.dropped += not is_kept
                        self._stats.host.bytes_written += self._host.page_bytes * is_kept
                    if page is not None:
                        self._host.release(page)
                self._lock.notify_all()


class Writer:
    """Writes complete pages of host memory to a tier below it, each held until it is written or dropped.

    A page that can't be written is dropped: it stays in host memory until it is evicted there. `lock` guards the tiers
    and the counters; all methods but `close` are called under it.

    Args:
      write: writes a page, without the lock.
    """

    def __init__(
        self,
        lock: threading.Condition,
        host: HostTier,
        counters: TierCounters,
        most_pages: int,
        name: str,
        write: Callable[[HostPage], None],
    ) -> None:
        self._lock, self._host, self._counters = lock, host, counters
        self._most, self._name, self._write = most_pages, name, write
        self._waiting: set[Key] = set()  # and the one that is being written
        self._workers = Workers(1, name)
        self._faults = FaultLog()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, page: HostPage) -> None:
        """Write a page in time."""
        if self._is_closed or page.name.key in self._waiting:
            return
        if len(self._waiting) >= self._most:
            self._counters.dropped += 1
            return
        self._host.hold(page)
        self._waiting.add(page.name.key)
        self._workers.submit(lambda: self._write_next(page))

    def close(self, timeout: float) -> None:
        """End; what waits is dropped. It is called without the lock."""
        self._is_closed = True
        self._workers.close(timeout)

    def _write_next(self, page: HostPage) -> None:
        is_dropped, fault = self._is_closed, None
        try:
            if not is_dropped:
                self._write(page)
        except Exception as error:
            fault = f"{self._name}: a page can't be written: {error!r} (later errors are counted)"
        finally:
            if not is_dropped:
                self._faults.note(fault, f"{self._name}: pages are written again")
            with self._lock:
                if not is_dropped:
                    self._counters.is_failing = fault is not None
                self._counters.failed += fault is not None
                self._counters.dropped += is_dropped or fault is not None
                self._waiting.discard(page.name.key)
                self._host.release(page)
                self._lock.notify_all()
