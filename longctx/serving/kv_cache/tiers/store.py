"""`TieredStore`: pages beyond the devices, in host memory and on disk, for the executor and the driver of an engine."""

import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from longctx.serving.kv_cache.connector import Arrivals, PageRead, PageStore
from longctx.serving.kv_cache.encryption import disk_key
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.disk_tier import DiskTier
from longctx.serving.kv_cache.tiers.host_memory import HostPage, HostTier, PageChecksum
from longctx.serving.kv_cache.tiers.index import TierListener, TierStats
from longctx.serving.kv_cache.tiers.loader import PageLoader
from longctx.serving.kv_cache.tiers.remote import CHECKSUM_BYTES, RemoteProbe, RemoteStore, open_remote, remote_name
from longctx.serving.kv_cache.tiers.writer import StoreQueue, Writer

_MOST_QUEUE_BYTES = 2**30
_MOST_PREFETCHES = 8


class TieredStore:
    """Pages in host memory, on disk and in a remote store. It is a `PageKeeper`; any thread may call it.

    A page is written to host memory first, then to disk and to the remote store in the background. A hit on disk or in
    the remote store brings it back to host memory. What is lost on the way is a miss; each page is compared with its
    checksum before it is given to anybody.
    """

    def __init__(
        self,
        config: TierConfig,
        layout: PageLayout,
        fingerprint: bytes,
        part: PageSlice | None = None,
        remote: RemoteStore | None = None,
        queue_bytes: int | None = None,
    ) -> None:
        """Allocate host memory, and find what is on disk.

        Args:
          config: sizes and rules. Processes may share a folder; each has `disk_bytes` there.
          layout: of pages. fingerprint: of the model (`page_fingerprint`); pages of others are never found.
          part: layers and KV heads that this process's devices have. None: all.
          remote: a store beyond this machine. None: that of `config`.
          queue_bytes: of pages that wait to be written, at most: those that come from the devices, and those that go
            to disk. None: a quarter of host memory, at most 1 GiB.

        Raises:
          ValueError: host memory has no room for a page, or the folder or the remote store can't be used; the message
            names it.
        """
        part = layout.whole if part is None else part
        queue_bytes = min(config.host_bytes // 4, _MOST_QUEUE_BYTES) if queue_bytes is None else queue_bytes
        if remote is None and config.store is not None:
            remote = open_remote(config.store)

        self.layout, self.part = layout, part
        self._lock = threading.Condition()
        self._stats = TierStats()
        self._host = HostTier(config.host_bytes, layout, part, config.eviction)
        self._disk = None
        if config.disk is not None:
            key_file = config.disk_key_file
            key = None if key_file is None else disk_key(key_file)
            self._disk = DiskTier(Path(config.disk), layout, part, fingerprint, config.disk_bytes, config.eviction, key)
        self._tiers = [tier for tier in (self._host, self._disk) if tier is not None]
        self._pins: dict[Key, float] = {}
        self._next_expiry = math.inf
        self._is_closed = False
        self._fingerprint = fingerprint
        self._remote, self._probe = remote, None if remote is None else RemoteProbe(remote)
        most, checksum = max(1, queue_bytes // self._page_bytes), PageChecksum(fingerprint, part)
        self._store_queue = StoreQueue(self._lock, part, checksum, self._host, self._stats, most, self._has, self._keep)
        self._loader = PageLoader(
            self._lock, layout, part, fingerprint, self._host, self._disk, remote, self._stats, self._admit
        )
        self._writers: list[Writer] = []
        for name, is_there, counters, write in (
            ("kv-write", self._disk is not None, self._stats.disk, self._write_to_disk),
            ("kv-write-remote", remote is not None, self._stats.remote, self._write_to_remote),
        ):
            if is_there:
                self._writers.append(Writer(self._lock, self._host, counters, most, name, write))
        self._queues: list[StoreQueue | Writer] = [self._store_queue, *self._writers]

    # What is there

    def count(self, keys: Sequence[Key]) -> int:
        """Return how many leading pages are in host memory or on disk. Quick: it asks no disk, and no remote store."""
        with self._lock:
            self._expire()
            return next((i for i, key in enumerate(keys) if not self._has(key)), len(keys))

    def look_up(self, keys: Sequence[Key]) -> int:
        """Return how many leading pages are in some tier, and fetch those beyond host memory ahead.

        It does not wait: a remote store has what it said a short time ago, see `ask_ahead`.
        """
        count = self.count(keys)
        if self._probe is not None and count < len(keys):
            names = [remote_name(self._fingerprint, key, self.part) for key in keys[count:]]
            count += self._probe.exists(names)
        self.prefetch(keys[:count])
        return count

    def ask_ahead(self, keys: Sequence[Key]) -> "Future[None] | None":
        """Ask a remote store, for `look_up`; the future ends with its answer. None: there is nothing to wait for."""
        if self._probe is None or (count := self.count(keys)) == len(keys):
            return None
        return self._probe.ask([remote_name(self._fingerprint, key, self.part) for key in keys[count:]])

    @property
    def pinnable_pages(self) -> int:
        """Pages that can be pinned, in the largest tier."""
        return max(tier.max_pinned for tier in self._tiers) // self._page_bytes

    def count_by_tier(self, keys: Sequence[Key]) -> dict[str, int]:
        """Return how many of some pages are in host memory, and on disk."""
        with self._lock:
            return {"disk": 0} | {tier.tier: sum(key in tier for key in keys) for tier in self._tiers}

    @property
    def tiers(self) -> list[str]:
        """The tiers that there are: `"host"`, and those of `"disk"` and `"remote"` that it was made with."""
        return [tier.tier for tier in self._tiers] + ["remote"] * (self._probe is not None)

    def tier_of(self, key: Key) -> str | None:
        """The first tier that has a page: `"host"`, `"disk"`, or None."""
        with self._lock:
            return next((tier.tier for tier in self._tiers if key in tier), None)

    @property
    def num_loads(self) -> int:
        """Loads in progress, also those that only bring pages to host memory."""
        return self._loader.num_loads

    # Pages that leave the devices

    def wanted(self, stores: Sequence[PageStore]) -> list[PageStore]:
        """Pages that are not there yet, as many as there is room for on the way; only these need to be read."""
        with self._lock:
            self._expire()
            return [] if self._is_closed else self._store_queue.wanted(stores)

    def put(self, stores: Sequence[PageStore], read: PageRead) -> None:
        """Keep pages once they are read; it doesn't wait. Pages that are there already, or too many, are left out."""
        with self._lock:
            if not self._is_closed:
                self._store_queue.put(stores, read)

    # Pages that return

    def fetch(self, keys: Sequence[Key], wake: Callable[[], object]) -> Arrivals:
        """Begin to load pages, up to the first that no tier has or that is wrong. See `PageSource`."""
        return self._loader.fetch(keys, wake)

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Bring pages that a waiting request will need to host memory, when there is nothing more urgent.

        At most a quarter of host memory is brought at a time; what is too much is left.
        """
        with self._lock:
            is_needed = not all(key in self._host for key in keys)
        if is_needed and self.num_loads < _MOST_PREFETCHES:
            self._loader.prefetch(keys[: max(1, self._host.num_slots // 4)])

    # Keeping and forgetting

    def pin(self, keys: Sequence[Key], until: float) -> int:
        """Keep pages until a time of `time.monotonic()`, in each tier that they are in or get to meanwhile.

        At most half of a tier is pinned. Returns how many leading pages are pinned in some tier now; of those that are
        on their way, none. A time that is over unpins them.
        """
        with self._lock:
            self._expire()
            if until <= time.monotonic():
                for key in keys:
                    self._unpin(key)
                return 0
            self._next_expiry = min(until, self._next_expiry)
            pinned = []
            for key in keys:
                self._pins[key] = max(until, self._pins.get(key, until))
                pinned.append(sum(tier.pin(key) for tier in self._tiers) > 0)
            return pinned.index(False) if False in pinned else len(pinned)

    def evict(self, is_wanted: Callable[[Key], bool]) -> int:
        """Let pages leave host memory whose keys are wanted so; how many did.

        Pinned ones stay, and where there is a disk, those that it does not have.
        """
        with self._lock:
            self._expire()
            pages = [page for page in self._host if is_wanted(page.name.key) and page.name.key not in self._pins]
            pages = [page for page in pages if self._disk is None or page.name.key in self._disk]
            for page in pages:
                self._host.remove(page)
        return len(pages)

    def flush(self, timeout: float) -> bool:
        """Wait until what is on its way is in host memory and on disk; False: it is not so after `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not any(map(len, self._queues)), timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits, for `timeout` seconds at most, and end all threads. Loads in progress end short."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.flush(timeout)
        self._store_queue.close(timeout)
        self._loader.close(timeout)
        for writer in self._writers:
            writer.close(timeout)
        if self._probe is not None:
            self._probe.close()
        if self._disk is not None:
            self._disk.close()

    # Checking and watching

    def listen(self, listener: TierListener) -> None:
        """Tell a listener of all pages in host memory and on disk, and of changes from now on."""
        with self._lock:
            for tier in self._tiers:
                tier.listen(listener)

    @property
    def stats(self) -> TierStats:
        """Counters, as they are now."""
        with self._lock:
            stats = copy.deepcopy(self._stats)
            for tier in self._tiers:
                counters = getattr(stats, tier.tier)
                counters.evicted, counters.pages = tier.num_evicted, len(tier)
                counters.num_bytes, counters.pinned_bytes, counters.capacity = tier.used, tier.pinned, tier.capacity
            stats.disk.corrupt += 0 if self._disk is None else self._disk.num_unusable
            stats.waiting_bytes = sum(map(len, self._queues)) * self._page_bytes
            return stats

    @property
    def _page_bytes(self) -> int:
        return self._host.page_bytes

    def _has(self, key: Key) -> bool:
        return any(key in tier for tier in self._tiers)

    def _expire(self) -> None:
        """End pins whose time has come."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        for key in [key for key, until in self._pins.items() if until <= now]:
            self._unpin(key)
        self._next_expiry = min(self._pins.values(), default=math.inf)

    def _unpin(self, key: Key) -> None:
        self._pins.pop(key, None)
        for tier in self._tiers:
            tier.unpin(key)

    def _admit(self, page: HostPage, checksum: int) -> bool:
        """Let a complete page be found in host memory; False if another one with its key can be found already."""
        is_new = self._host.commit(page, checksum)
        if is_new and page.name.key in self._pins:
            self._host.pin(page.name.key)
        return is_new

    def _keep(self, page: HostPage, checksum: int) -> bool:
        """Let a page that comes from the devices be found, and write it below host memory in time."""
        is_new = self._admit(page, checksum)
        if is_new:
            for writer in self._writers:
                writer.add(page)
        return is_new

    def _write_to_disk(self, page: HostPage) -> None:
        disk, key, freed = self._disk, page.name.key, 0
        assert disk is not None
        while True:
            free_bytes = disk.free_bytes()
            with self._lock:
                planned = None if key in disk else disk.plan(page.name, free_bytes)
                if planned is None:
                    self._stats.disk.dropped += key not in disk
                    return
            file, removed = planned
            disk.delete(removed)
            try:
                disk.write(file, self._host.buffer(page), page.checksum)
                break
            except OSError as error:
                if freed > file.size:  # and still there is no room: others take it
                    raise
                with self._lock:
                    removed = disk.recover(error)
                disk.delete(removed)
                freed += file.size
        with self._lock:
            disk.add(file)
            if key in self._pins:
                disk.pin(key)
            self._stats.disk.stored += 1
            self._stats.disk.bytes_written += file.size

    def _write_to_remote(self, page: HostPage) -> None:
        assert self._remote is not None
        name = remote_name(self._fingerprint, page.name.key, self.part)
        value = page.checksum.to_bytes(CHECKSUM_BYTES, "little") + self._host.buffer(page)
        is_kept = self._remote.put(name, value)
        with self._lock:
            self._stats.remote.stored += is_kept
            self._stats.remote.dropped += not is_kept
            self._stats.remote.bytes_written += len(value) * is_kept
