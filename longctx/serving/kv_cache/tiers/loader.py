"""Loads of pages from tiers: from host memory, from disk into host memory, from a remote store into host memory.

A load is read a few pages at a time, so that several of them come forward together. Each page's checksum is compared
before anybody sees it; the first page that is missing or wrong everywhere ends its load.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from longctx.serving.kv_cache.connector import Arrivals, PageBlock
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.disk_tier import DiskPage, DiskTier
from longctx.serving.kv_cache.tiers.host_memory import HostPage, HostTier, PageChecksum
from longctx.serving.kv_cache.tiers.index import PageName, TierCounters, TierStats
from longctx.serving.kv_cache.tiers.remote import CHECKSUM_BYTES, RemoteStore, remote_name
from longctx.serving.kv_cache.tiers.writer import IN_THE_BACKGROUND, URGENT, Workers

_THREADS = 2
_CHUNK_BYTES = 16 * 2**20
_AHEAD_DELAY = 0.05  # seconds: most requests begin to load within them, what then is fetched ahead were read twice


class _Load:
    """A fetch in progress; without a fetch, pages are only brought to host memory.

    Attributes:
      keys: of its pages. parents: of each of them but the first, the one before it.
      done: leading pages that are through.
      held: pages of host memory that will be given. given: those that were, until the fetch is closed; None after that.
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = list(keys)
        self.fetch: Arrivals | None = None
        self.parents = dict(zip(self.keys[1:], self.keys, strict=False))
        self.held: dict[Key, HostPage] = {}
        self.given: list[HostPage] | None = []
        self.done = 0
        self.is_overtaken = False

    @property
    def is_wanted(self) -> bool:
        return not self.is_overtaken if self.fetch is None else not self.fetch.is_closed


class PageLoader:
    """Reads the loads of one store in threads of its own. `lock` guards the tiers and the counters."""

    def __init__(
        self,
        lock: threading.Condition,
        layout: PageLayout,
        part: PageSlice,
        fingerprint: bytes,
        host: HostTier,
        disk: DiskTier | None,
        remote: RemoteStore | None,
        stats: TierStats,
        admit: Callable[[HostPage, int], bool],
    ) -> None:
        """`admit(page, checksum)` lets a page be found in host memory; it is called under the lock."""
        self._lock, self._layout, self._part, self._fingerprint = lock, layout, part, fingerprint
        self._host, self._disk, self._remote = host, disk, remote
        self._stats, self._admit, self._checksum = stats, admit, PageChecksum(fingerprint, part)
        self._chunk = max(1, _CHUNK_BYTES // host.page_bytes)
        self._workers = Workers(_THREADS, "kv-load")
        # A remote store that hangs delays no other load.
        self._remote_workers = Workers(1, "kv-load-remote") if remote is not None else None
        self._loads: set[_Load] = set()
        self._is_closed = False

    def fetch(self, keys: Sequence[Key], wake: Callable[[], object]) -> Arrivals:
        """Read pages, up to the first that no tier has or that is wrong; loads ahead of its pages end."""
        load = _Load(keys)

        def close() -> None:
            with self._lock:
                given, load.given = load.given or [], None
                self._release(given)

        load.fetch = Arrivals(len(keys), self._part, wake, lambda _: None, close, lambda _: None)
        with self._lock:
            if is_open := not self._is_closed:
                self._loads.add(load)
                for other in self._loads:
                    other.is_overtaken |= other.fetch is None and not set(keys).isdisjoint(other.keys)
                self._begin(load)
        if not is_open:
            load.fetch.end("ended")
        return load.fetch

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Bring pages to host memory when there is nothing more urgent."""
        load = _Load(keys)
        with self._lock:
            if not self._is_closed:
                load.keys = [key for key in load.keys if key not in self._host]
                self._loads.add(load)
                later = threading.Timer(_AHEAD_DELAY, self._submit, (self._workers, load, self._read))
                later.daemon = True
                later.start()

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    def close(self, timeout: float) -> None:
        """End all loads where they are."""
        with self._lock:
            self._is_closed = True
        self._workers.close(timeout)
        if self._remote_workers is not None:
            self._remote_workers.close(timeout)
        for load in list(self._loads):  # of threads that hang
            self._end(load)

    def _is_right(self, page: HostPage) -> bool:
        return self._checksum(page.name.key, self._host.buffer(page)) == page.checksum

    def _begin(self, load: _Load) -> None:
        """Hold what is in host memory, so that it is still there when its turn comes."""
        known = on_disk = 0
        for key in load.keys:
            if (page := self._host.find(key)) is not None:
                self._host.hold(page)
                self._host.use(page)
                load.held[key] = page
            elif self._disk is not None and key in self._disk:
                on_disk += 1
            else:
                break
            known += 1
        self._stats.host.misses += len(load.keys) - known + on_disk
        self._stats.disk.misses += (len(load.keys) - known) * (self._disk is not None)
        self._submit(self._workers, load, self._read)

    def _submit(self, workers: Workers, load: _Load, step: Callable[[_Load], None]) -> None:
        def job() -> None:
            try:
                if load.is_wanted and not self._is_closed:
                    step(load)
                else:
                    self._end(load)
            except BaseException:
                self._end(load)
                raise

        workers.submit(job, IN_THE_BACKGROUND if load.fetch is None else URGENT)

    def _end(self, load: _Load) -> None:
        with self._lock:
            self._release(load.held.values())
            load.held.clear()
            is_first = load in self._loads
            self._loads.discard(load)
            self._lock.notify_all()
        if is_first and load.fetch is not None:
            load.fetch.end("ended")

    def _release(self, pages: Iterable[HostPage]) -> None:
        for page in reversed(list(pages)):
            self._host.release(page)

    def _read(self, load: _Load) -> None:
        """Read the next few pages, all from host memory or all from disk, if they are there."""
        pages: list[HostPage] = []
        files: list[DiskPage] = []
        with self._lock:
            for key in load.keys[load.done : load.done + self._chunk]:
                page = load.held.get(key) or self._host.find(key)
                if page is not None and not files:
                    if key not in load.held:
                        self._host.hold(page)
                        load.held[key] = page
                    pages.append(page)
                elif page is None and not pages and self._disk is not None and (file := self._disk.find(key)):
                    self._disk.use(file)
                    files.append(file)
                else:
                    break
        if pages:
            self._give_host_pages(load, pages)
        elif files:
            self._load_from_disk(load, files)
        elif self._remote_workers is not None and load.done < len(load.keys):
            self._submit(self._remote_workers, load, self._read_remote)
            return
        else:
            self._end(load)
            return
        self._submit(self._workers, load, self._read)

    def _give_host_pages(self, load: _Load, pages: list[HostPage]) -> None:
        """Give pages of host memory, up to one that is wrong, which is forgotten."""
        right = next((i for i, page in enumerate(pages) if not self._is_right(page)), len(pages))
        with self._lock:
            for page in pages[: right + 1]:
                del load.held[page.name.key]
            self._stats.host.hits += right * (load.fetch is not None)
            self._stats.host.bytes_read += right * self._host.page_bytes
            if right < len(pages):
                wrong = pages[right]
                self._stats.host.corrupt += 1
                if self._host.find(wrong.name.key) is wrong:
                    self._host.remove(wrong)
                self._host.release(wrong)
        self._give(load, pages[:right], [self._host.pages[page.slot] for page in pages[:right]])

    def _load_from_disk(self, load: _Load, files: list[DiskPage]) -> None:
        """Read pages from disk, up to one that is wrong or gone: those are forgotten."""

        def read(outs: list[np.ndarray]) -> list[int]:
            disk, sums = self._disk, list[int]()
            assert disk is not None
            for file, out in zip(files, outs, strict=True):
                if (checksum := disk.read(file, out.data.cast("B"))) is None:
                    wrong = {file, *(other for other in files if not other.path.exists())}
                    with self._lock:
                        for page in (page for page in wrong if disk.find(page.name.key) is page):
                            self._stats.disk.corrupt += page.path.exists()
                            disk.remove(page)
                            disk.delete([page])
                        disk.forget_removed()
                    break
                sums.append(checksum)
            return sums

        self._fill(load, [file.name for file in files], read, self._stats.disk)

    def _read_remote(self, load: _Load) -> None:
        """Read the next few pages from the remote store."""
        keys = load.keys[load.done :][: self._chunk]

        def read(outs: list[np.ndarray]) -> list[int]:
            assert self._remote is not None
            names, sums = [remote_name(self._fingerprint, key, self._part) for key in keys], list[int]()
            count = min(self._remote.exists(names), len(names))
            values = np.zeros((count, CHECKSUM_BYTES + self._host.page_bytes), np.uint8)
            count = min(self._remote.get(names[:count], values), count) if count else 0
            for key, value, out in zip(keys[:count], values, outs, strict=False):
                checksum, data = int.from_bytes(value[:CHECKSUM_BYTES].tobytes(), "little"), out.data.cast("B")
                data[:] = value[CHECKSUM_BYTES:].data
                if self._checksum(key, data) != checksum:
                    with self._lock:
                        self._stats.remote.corrupt += 1
                    break
                sums.append(checksum)
            return sums

        names = [PageName(key, load.parents.get(key, b""), number) for number, key in enumerate(keys, load.done)]
        if self._fill(load, names, read, self._stats.remote) == len(keys):
            self._submit(self._workers, load, self._read)
        else:
            self._stats.remote.misses += (len(load.keys) - load.done) * (load.fetch is not None)
            self._end(load)

    def _fill(
        self, load: _Load, names: list[PageName], read: Callable[[list[np.ndarray]], list[int]], counters: TierCounters
    ) -> int:
        """Read pages into host memory, keep and give those that came right, the leading ones; how many these are.

        `read` fills arrays, and returns the checksums of those that came right.
        """
        pages, outs = self._targets(names)
        sums: list[int] = []
        try:
            sums = read(outs)
        finally:
            self._keep(load, pages, sums)
        with self._lock:
            counters.hits += len(sums) * (load.fetch is not None)
            counters.bytes_read += len(sums) * self._host.page_bytes
        self._give(load, pages[: len(sums)], outs[: len(sums)])
        return len(sums)

    def _targets(self, names: list[PageName]) -> tuple[list[HostPage | None], list[np.ndarray]]:
        """Slots to read pages into, held, and their arrays; memory of its own where none is to be had."""
        with self._lock:
            pages = [self._host.reserve(name) for name in names]
        memory, shape = self._host.pages, self._layout.part_shape(self._part)
        return pages, [np.empty(shape, self._layout.bits) if page is None else memory[page.slot] for page in pages]

    def _keep(self, load: _Load, pages: list[HostPage | None], sums: list[int]) -> None:
        """Let pages be found that came whole, with these checksums; give back the slots of those after them."""
        with self._lock:
            for number, page in enumerate(pages):
                if page is None:
                    continue
                if number >= len(sums):
                    self._host.release(page)
                else:
                    self._admit(page, sums[number])

    def _give(self, load: _Load, pages: Sequence[HostPage | None], outs: Sequence[np.ndarray]) -> None:
        """Give pages that are held to the load's fetch; slots that lie together are one block."""
        first, held = load.done, [page for page in pages if page is not None]
        load.done += len(outs)
        with self._lock:
            if load.fetch is None or load.given is None:
                self._release(held)
                return
            load.given += held

        def place(i: int) -> object:
            page = pages[i]
            return (i,) if page is None else page.slot - i

        for _, run in itertools.groupby(range(len(outs)), place):
            at, *others = run
            page = pages[at]
            data = outs[at][None] if page is None else self._host.pages[page.slot : page.slot + 1 + len(others)]
            load.fetch.put(PageBlock(first + at, self._part, data))
