"""Writing pages below host memory, in the background: into files of many pages, and to a remote store.

Each has a thread and a queue of its own, so that one which hangs delays no other. A queue has a limit in bytes; beyond
it the coldest pages are dropped.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.disk_tier import DiskTier
from longctx.serving.kv_cache.tiers.host_memory import HostPage, HostTier
from longctx.serving.kv_cache.tiers.index import TierIndex
from longctx.serving.kv_cache.tiers.page_file import PageRecord
from longctx.serving.kv_cache.tiers.remote import CHECKSUM_BYTES, RemoteStore, remote_name
from longctx.serving.kv_cache.tiers.stats import TierCounters


class WriteBackQueue:
    """First in, first out. What is dropped for room is chosen as a tier chooses: by the rule, from tails of chains.

    Attributes:
      num_bytes: that wait. since: when the oldest of them came, in seconds of the caller's clock.
    """

    def __init__(self, capacity: int, page_bytes: int, eviction: str) -> None:
        self._page_bytes = page_bytes
        self._index: TierIndex[Key] = TierIndex(capacity, eviction)
        self._waiting: dict[Key, tuple[HostPage, float]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    @property
    def num_bytes(self) -> int:
        return self._index.used

    @property
    def since(self) -> float | None:
        return next((when for _, when in self._waiting.values()), None)

    def add(self, page: HostPage, now: float) -> list[HostPage]:
        """Let a page wait; returns those that don't wait any more, which may be this one."""
        key, parent, number = page.name
        if key in self._waiting:
            return [page]
        evicted = self._index.make_room(self._page_bytes)
        dropped = [self._waiting.pop(name)[0] for name in evicted]
        if not self._index.has_room(self._page_bytes):
            return [*dropped, page]
        self._index.add(key, self._page_bytes, number, parent or None)
        self._waiting[key] = page, now
        return dropped

    def take(self, max_bytes: int) -> list[HostPage]:
        """Return the pages that came first, at most `max_bytes` together, and at least one if there is one."""
        keys = list(self._waiting)[: max(1, max_bytes // self._page_bytes)]
        return [self._pop(key) for key in keys]

    def clear(self) -> list[HostPage]:
        """Let nothing wait; returns what did."""
        return [self._pop(key) for key in list(self._waiting)]

    def forget(self, key: Key) -> HostPage | None:
        """Let a page wait no more; None if it didn't."""
        return self._pop(key) if key in self._waiting else None

    def _pop(self, key: Key) -> HostPage:
        self._index.remove(key)
        return self._waiting.pop(key)[0]


FILE_BYTES = 32 * 2**20
LINGER_SECONDS = 0.5  # for which a page waits for others to fill its file


class Writer(ABC):
    """Takes complete pages of host memory, each held until it is written or dropped.

    A page that can't be written is dropped: it stays in host memory until it is evicted there. `lock` guards the tiers
    and the counters; all methods but `close` are called under it.

    Attributes:
      last_error: the last error, for people.
    """

    def __init__(
        self, lock: threading.Condition, host: HostTier, queue: WriteBackQueue, counters: TierCounters, name: str
    ) -> None:
        self._lock, self._host, self._queue, self._counters = lock, host, queue, counters
        self._at_work: set[Key] = set()  # less those that have been forgotten
        self._is_busy = self._is_hurried = self._is_closed = False
        self.last_error = ""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _write(self, pages: list[HostPage]) -> None:
        """Write pages, without the lock. Those whose keys are not `_at_work` any more must not be found after it."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is being written."""
        return not self._queue and not self._is_busy

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that wait."""
        return self._queue.num_bytes

    def add(self, page: HostPage) -> None:
        """Write a page in time."""
        if not self._is_closed and page.name.key not in self._at_work:
            self._host.hold(page)
            self._drop(self._queue.add(page, time.monotonic()))
            self._lock.notify_all()

    def hurry(self) -> None:
        """Write what waits without waiting for more."""
        self._is_hurried = True
        self._lock.notify_all()

    def forget(self, key: Key) -> None:
        """Don't write a page; one that is being written won't be found."""
        page = self._queue.forget(key)
        if page is not None:
            self._host.release(page)
        self._at_work.discard(key)

    def clear(self) -> None:
        """Write no page that waits; those that are being written won't be found."""
        for page in self._queue.clear():
            self._host.release(page)
        self._at_work.clear()

    def close(self, timeout: float) -> None:
        """End; what waits is dropped. It is called without the lock."""
        with self._lock:
            self._is_closed = True
            self._drop(self._queue.clear())
            self._lock.notify_all()
        self._thread.join(timeout)

    def _drop(self, pages: Sequence[HostPage]) -> None:
        self._counters.dropped += len(pages)
        for page in pages:
            self._host.release(page)

    def _fail(self, error: Exception, num_pages: int) -> None:
        with self._lock:
            self._counters.failed += 1
            self._counters.dropped += num_pages
            self.last_error = str(error) or repr(error)

    def _work(self) -> None:
        while (pages := self._next()) is not None:
            try:
                self._write(pages)
            except Exception as error:
                self._fail(error, len(pages))
            finally:
                with self._lock:
                    for page in pages:
                        self._host.release(page)
                    self._at_work.clear()
                    self._is_busy = False
                    self._lock.notify_all()

    def _next(self) -> list[HostPage] | None:
        """Wait for the next pages to write; None: the writer is closed."""
        with self._lock:
            while not self._is_closed and not self._is_due:
                self._lock.wait(LINGER_SECONDS if self._queue else None)
            if self._is_closed:
                return None
            pages = self._queue.take(FILE_BYTES)
            self._at_work, self._is_busy = {page.name.key for page in pages}, True
            if not self._queue:
                self._is_hurried = False
            return pages

    @property
    def _is_due(self) -> bool:
        since = self._queue.since
        return since is not None and (
            self._is_hurried or self._queue.num_bytes >= FILE_BYTES or time.monotonic() - since >= LINGER_SECONDS
        )


class DiskWriter(Writer):
    """Writes pages to files of a disk tier."""

    def __init__(
        self,
        lock: threading.Condition,
        host: HostTier,
        queue: WriteBackQueue,
        counters: TierCounters,
        disk: DiskTier,
        pins: dict[Key, float],
    ) -> None:
        """`pins`: until when pages are pinned, also those that get to the disk in future."""
        self._disk, self._pins = disk, pins
        super().__init__(lock, host, queue, counters, "kv-write")

    def _write(self, pages: list[HostPage]) -> None:
        disk = self._disk
        with self._lock:
            pages = [page for page in pages if page.name.key not in disk and page.name.key in self._at_work]
            records = [PageRecord(*page.name, page.checksum) for page in pages]
            planned = disk.plan(records) if records else None
            if planned is None:
                self._counters.dropped += len(pages)
                return
        file, paths_to_delete = planned
        try:
            disk.write(file, [self._host.memory.buffer(page.slot) for page in pages], paths_to_delete)
        except OSError as error:
            self._fail(error, len(pages))
            return
        with self._lock:
            is_wanted = all(record.key in self._at_work for record in records)
            if is_wanted:
                disk.commit(file)
                for record in records:
                    if (until := self._pins.get(record.key)) is not None:
                        disk.pin(record.key, until)
                self._counters.stored += len(pages)
                self._counters.bytes_written += file.size
        if not is_wanted:  # a page that was forgotten meanwhile must not come back, not even after a restart
            disk.delete([file.path])


class RemoteWriter(Writer):
    """Writes pages to a remote store."""

    def __init__(
        self,
        lock: threading.Condition,
        host: HostTier,
        queue: WriteBackQueue,
        counters: TierCounters,
        remote: RemoteStore,
        fingerprint: bytes,
        part: PageSlice,
    ) -> None:
        self._remote, self._fingerprint, self._part = remote, fingerprint, part
        super().__init__(lock, host, queue, counters, "kv-write-remote")

    def _write(self, pages: list[HostPage]) -> None:
        for page in pages:
            name = remote_name(self._fingerprint, page.name.key, self._part)
            value = page.checksum.to_bytes(CHECKSUM_BYTES, "little") + self._host.memory.buffer(page.slot)
            try:
                is_kept = self._remote.put(name, value)
            except Exception as error:
                self._fail(error, 1)
                continue
            with self._lock:
                self._counters.stored += is_kept
                self._counters.dropped += not is_kept
                self._counters.bytes_written += len(value) * is_kept
