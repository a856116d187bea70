"""Loads of pages from tiers: from host memory, from disk into host memory, from a remote store into host memory.

A load is read a few pages at a time, so that several of them come forward together. Each page's checksum is compared
before anybody sees it; the first page that is missing or wrong everywhere ends its load.
"""

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.disk_tier import DiskTier, Piece
from longctx.serving.kv_cache.tiers.host_memory import HostPage, HostTier, PageName
from longctx.serving.kv_cache.tiers.page_reader import PageReader
from longctx.serving.kv_cache.tiers.parts import part_shape
from longctx.serving.kv_cache.tiers.remote import RemoteStore
from longctx.serving.kv_cache.tiers.stats import TierStats


class TierFetch:
    """A `PageFetch`. Its blocks are views of host memory, whose pages stay until it is closed.

    Attributes:
      keys: of the pages. num_given: how many leading ones have come.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        part: PageSlice,
        wake: Callable[[], object],
        release: Callable[[Sequence[HostPage]], None],
    ) -> None:
        self.keys, self.num_given = list(keys), 0
        self._part, self._wake, self._release = part, wake, release
        self._lock = threading.Lock()
        self._blocks: deque[np.ndarray] = deque()
        self._held: list[HostPage] = []
        self._num_taken = 0
        self._is_ended = self._is_closed = False

    def take(self, max_bytes: int) -> list[PageBlock]:
        taken: list[PageBlock] = []
        with self._lock:
            while self._blocks and (max_bytes > 0 or not taken):
                data = self._blocks.popleft()
                count = max(min(len(data), max_bytes // (data.nbytes // len(data))), 0 if taken else 1)
                if count < len(data):
                    self._blocks.appendleft(data[count:])
                if not count:
                    break
                taken.append(PageBlock(self._num_taken, self._part, data[:count]))
                self._num_taken += count
                max_bytes -= taken[-1].data.nbytes
        return taken

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._is_closed or (self._is_ended and not self._blocks)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_pages(self) -> int:
        return self._num_taken

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            held, self._held = self._held, []
            self._blocks.clear()
        self._release(held)

    def give(self, pages: Sequence[HostPage], data: Sequence[np.ndarray]) -> None:
        """More pages have come, as arrays `[pages, ...]` of consecutive ones, and are held for this fetch."""
        with self._lock:
            if is_closed := self._is_closed:
                held = list(pages)
            else:
                self._held += pages
                self._blocks.extend(data)
                self.num_given += sum(map(len, data))
        if is_closed:
            self._release(held)
        else:
            self._wake()

    def end(self) -> None:
        """No more pages will come."""
        with self._lock:
            self._is_ended = True
        self._wake()


logger = logging.getLogger(__name__)

URGENT, IN_THE_BACKGROUND = 0, 1
_LAST = 2


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


_THREADS = 2
_CHUNK_BYTES = 16 * 2**20
_AHEAD_DELAY = 0.05  # seconds: most requests begin to load within them, what then is fetched ahead were read twice


class _Load:
    """A fetch in progress; without a fetch, pages are only brought to host memory.

    Attributes:
      keys: of its pages. parents: of each of them but the first, the one before it.
      items: what the next pages are read from, and held for it: a page, or pieces on disk.
      done: leading pages that are through. epoch: of the store when it began.
    """

    def __init__(self, keys: Sequence[Key], fetch: TierFetch | None, epoch: int) -> None:
        self.keys, self.fetch, self.epoch = list(keys), fetch, epoch
        self.key_set = frozenset(self.keys)
        self.parents = dict(zip(self.keys[1:], self.keys, strict=False))
        self.items: deque[HostPage | list[Piece]] = deque()
        self.done = 0
        self.is_overtaken = False

    @property
    def is_wanted(self) -> bool:
        return not self.is_overtaken if self.fetch is None else not self.fetch.is_closed


class PageLoader:
    """Reads the loads of one store in threads of its own. `lock` guards the tiers and the counters.

    Attributes:
      epoch: grows when the store is cleared: what was found before is not kept after.
    """

    def __init__(
        self,
        lock: threading.Condition,
        layout: PageLayout,
        part: PageSlice,
        reader: PageReader,
        host: HostTier,
        disk: DiskTier | None,
        remote: RemoteStore | None,
        stats: TierStats,
        admit: Callable[[HostPage, int], bool],
    ) -> None:
        """`admit(page, checksum)` lets a page be found in host memory; it is called under the lock."""
        self._lock, self._layout, self._shape = lock, layout, part_shape(layout, part)
        self._reader, self._host, self._disk, self._remote = reader, host, disk, remote
        self._stats, self._admit = stats, admit
        self._chunk = max(1, _CHUNK_BYTES // host.memory.page_bytes)
        self._workers = Workers(_THREADS, "kv-load")
        # A remote store that hangs delays no other load.
        self._remote_workers = Workers(1, "kv-load-remote") if remote is not None else None
        self._loads: set[_Load] = set()
        self._is_closed = False
        self.epoch = 0

    def begin(self, keys: Sequence[Key], fetch: TierFetch | None) -> None:
        """Read pages for a fetch; for none: bring them to host memory when there is nothing more urgent.

        A fetch ends loads of its pages that are none's.
        """
        load = _Load(keys, fetch, self.epoch)
        with self._lock:
            if is_open := not self._is_closed:
                self._loads.add(load)
                if fetch is None:
                    later = threading.Timer(_AHEAD_DELAY, self._submit, (self._workers, load, self._plan))
                    later.daemon = True
                    later.start()
                else:
                    for other in self._loads:
                        other.is_overtaken |= other.fetch is None and not load.key_set.isdisjoint(other.keys)
                    self._submit(self._workers, load, self._plan)
        if not is_open and fetch is not None:
            fetch.end()

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

    def _submit(self, workers: Workers, load: _Load, step: Callable[[_Load], None]) -> None:
        def job() -> None:
            try:
                if load.is_wanted and not self._is_closed:
                    step(load)
                else:
                    self._end(load)
            except BaseException as error:
                self._stats.last_error = repr(error)
                self._end(load)
                raise

        workers.submit(job, IN_THE_BACKGROUND if load.fetch is None else URGENT)

    def _plan(self, load: _Load) -> None:
        """Find and hold what the pages will be read from, up to the first that is nowhere."""
        with self._lock:
            if load.fetch is None:
                load.keys = [key for key in load.keys if key not in self._host]
            for key in load.keys:
                page = self._host.find(key)
                if page is not None:
                    self._host.hold(page)
                    self._host.index.use(key)
                    load.items.append(page)
                elif self._disk is not None and (pieces := self._disk.find(key)):
                    load.items.append(pieces)
                else:
                    break
            if load.fetch is not None:
                in_host = sum(isinstance(item, HostPage) for item in load.items)
                self._stats.host.misses += len(load.keys) - in_host
                self._stats.disk.misses += (len(load.keys) - len(load.items)) * (self._disk is not None)
        self._go_on(load)

    def _go_on(self, load: _Load) -> None:
        if load.items:
            self._submit(self._workers, load, self._read)
        elif self._remote_workers is not None and load.done < len(load.keys):
            self._submit(self._remote_workers, load, self._read_remote)
        else:
            self._end(load)

    def _end(self, load: _Load) -> None:
        with self._lock:
            for item in load.items:
                self._release(item)
            load.items.clear()
            is_first = load in self._loads
            self._loads.discard(load)
            self._lock.notify_all()
        if is_first and load.fetch is not None:
            load.fetch.end()

    def _release(self, item: HostPage | list[Piece], used: bool = False) -> None:
        if isinstance(item, HostPage):
            self._host.release(item)
        elif self._disk is not None:
            self._disk.release(item, used)

    def _read(self, load: _Load) -> None:
        """Read the next few pages, all from host memory or all from disk."""
        pages: list[HostPage] = []
        on_disk: list[list[Piece]] = []
        for item in itertools.islice(load.items, self._chunk):
            if isinstance(item, HostPage) and not on_disk:
                pages.append(item)
            elif not isinstance(item, HostPage) and not pages:
                on_disk.append(item)
            else:
                break
        is_right = self._give_host_pages(load, pages) if pages else self._load_from_disk(load, on_disk)
        if not is_right:  # the page may be elsewhere, or in an older file
            with self._lock:
                again = self._disk.find(load.keys[load.done]) if self._disk is not None else []
                if again:
                    load.items.appendleft(again)
            if not again:
                self._end(load)
                return
        self._go_on(load)

    def _give_host_pages(self, load: _Load, pages: list[HostPage]) -> bool:
        """Give pages of host memory; False if one was wrong, which is forgotten."""
        right = self._reader.check(pages)
        with self._lock:
            for _ in range(right):
                load.items.popleft()
            self._stats.host.hits += right * (load.fetch is not None)
            self._stats.host.bytes_read += right * self._host.memory.page_bytes
            if right < len(pages):
                self._stats.host.corrupt += 1
                if self._host.find(pages[right].name.key) is pages[right]:
                    self._host.forget(pages[right].name.key)
                self._host.release(pages[right])
                load.items.popleft()
        self._give(load, pages[:right], [self._host.memory.pages[page.slot] for page in pages[:right]])
        return right == len(pages)

    def _load_from_disk(self, load: _Load, chunk: list[list[Piece]]) -> bool:
        """Read pages from disk, keep them in host memory and give them; False if one was wrong, which is forgotten."""
        records = [pieces[0].record for pieces in chunk]
        pages, outs = self._targets([PageName(record.key, record.parent, record.number) for record in records])
        try:
            sums, wrong = self._reader.read_disk(chunk, outs)
        except BaseException:
            self._keep(load, pages, [])
            raise
        right = len(sums)
        with self._lock:
            for item in chunk[: right + bool(wrong)]:
                load.items.popleft()
                self._release(item, used=True)
            for piece in wrong:
                self._stats.disk.corrupt += self._disk.forget_piece(piece)  # type: ignore[union-attr]
            self._stats.disk.hits += right * (load.fetch is not None)
            self._stats.disk.bytes_read += right * self._host.memory.page_bytes
        self._keep(load, pages, sums)
        self._give(load, pages[:right], outs[:right])
        return not wrong

    def _read_remote(self, load: _Load) -> None:
        """Read the next few pages from the remote store, keep them in host memory and give them."""
        assert self._remote is not None
        first = load.done
        keys = load.keys[first:][: self._chunk]
        payloads, sums, is_corrupt = self._reader.read_remote(self._remote, keys)
        names = [PageName(key, load.parents.get(key, b""), first + i) for i, key in enumerate(keys[: len(sums)])]
        pages, outs = self._targets(names)
        for out, payload in zip(outs, payloads, strict=True):
            out.data.cast("B")[:] = payload.data
        with self._lock:
            counters = self._stats.remote
            counters.hits += len(sums) * (load.fetch is not None)
            counters.bytes_read += len(sums) * self._host.memory.page_bytes
            counters.corrupt += is_corrupt
            if len(sums) < len(keys) and load.fetch is not None:
                counters.misses += len(load.keys) - first - len(sums)
        self._keep(load, pages, sums)
        self._give(load, pages, outs)
        if len(sums) == len(keys):
            self._go_on(load)
        else:
            self._end(load)

    def _targets(self, names: list[PageName]) -> tuple[list[HostPage | None], list[np.ndarray]]:
        """Slots to read pages into, held, and their arrays; memory of its own where none is to be had."""
        with self._lock:
            pages = [self._host.reserve(name) for name in names]
        memory = self._host.memory.pages
        return pages, [
            np.empty(self._shape, self._layout.bits) if page is None else memory[page.slot] for page in pages
        ]

    def _keep(self, load: _Load, pages: list[HostPage | None], sums: list[int]) -> None:
        """Let pages be found that came whole, with these checksums; give back the slots of those after them."""
        with self._lock:
            for number, page in enumerate(pages):
                if page is None:
                    continue
                if number >= len(sums):
                    self._host.release(page)
                elif load.epoch == self.epoch:
                    self._admit(page, sums[number])

    def _give(self, load: _Load, pages: Sequence[HostPage | None], outs: Sequence[np.ndarray]) -> None:
        """Give pages that are held to whom they are for; slots that lie together are one array."""
        load.done += len(outs)
        held = [page for page in pages if page is not None]
        if load.fetch is None:
            with self._lock:
                for page in reversed(held):
                    self._host.release(page)
        elif outs:
            load.fetch.give(held, self._runs(pages, outs))

    def _runs(self, pages: Sequence[HostPage | None], outs: Sequence[np.ndarray]) -> list[np.ndarray]:
        runs: list[list[int]] = []
        data: list[np.ndarray] = []
        for page, out in zip(pages, outs, strict=True):
            if page is None:
                runs.append([])
                data.append(out[None])
            elif runs and runs[-1] and page.slot == runs[-1][1]:
                runs[-1][1] += 1
                data[-1] = self._host.memory.pages[runs[-1][0] : runs[-1][1]]
            else:
                runs.append([page.slot, page.slot + 1])
                data.append(out[None])
        return data
