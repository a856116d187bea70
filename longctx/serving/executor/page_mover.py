"""Moves pages between the devices and what keeps them elsewhere, beside the steps that an executor runs.

A thread takes blocks from where loads get their pages, and sends them to the devices, where they wait as arrays of
their own. The engine's thread only dispatches: the reads of stored pages, and, between steps, the programs that write
what has come over the pages of the pool. So the bus and the sources work while devices compute, and a step is delayed
by what it takes to copy a bounded number of bytes within a device's memory.

Whatever goes wrong with a load ends it short, and the rest is computed; a store that finds no room is dropped.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

from longctx.serving.executor.interface import MoverStats as MoverStats
from longctx.serving.kv_cache.connector import (
    LeasedSource,
    Loaded,
    MissingParts,
    PageBlock,
    PageFetch,
    PageKeeper,
    PageLoad,
    PageSource,
    PageStore,
)
from longctx.serving.runner.model_runner import ModelRunner
from longctx.serving.runner.page_transfer import DevicePageRead
from longctx.serving.scheduler.batch import Batch

logger = logging.getLogger(__name__)

PLACED_BYTES = 128 << 20
"""Of pages that wait on the devices to be written."""


@dataclass
class _Load:
    """A load; `fetch` is the placing thread's alone, but for `num_pages`.

    `missing`: what has not been written. `placed` are on their way to the
    devices; `is_over` if no more will be. `written`: waits until no device reads what the fetch has given.
    """

    request: PageLoad
    source: PageSource | None
    begun: float
    missing: MissingParts
    last_block: float
    fetch: PageFetch | None = None
    placed: deque[tuple[PageBlock, Any, int]] = field(default_factory=deque)
    written: list[Callable[[], object]] = field(default_factory=list)
    is_over: bool = False
    failed: bool = False
    is_done: bool = False

    @property
    def num_pages(self) -> int:
        """Leading pages that are written, and that the source says were right."""
        return 0 if self.fetch is None else max(0, min(self.missing.num_leading, self.fetch.num_pages))


class PageMover:
    """Moves pages for a runner's engine. All methods are for the engine's thread.

    Args:
      sink: keeps pages of `Batch.stores`; None: they are not kept.
      sources: of `PageLoad.source`; may change meanwhile. A load from an unknown one ends at once, with nothing.
      step_bytes: that are written between two steps, at most (but one block at least).
      placed_bytes: that wait on the devices to be written, and `read_bytes`: of pages that the sink has not taken yet.
      deadline: seconds after which a load ends short if no block comes; more if its source has a longer `page_timeout`.
      has_window: whether pages have window pages.

    Attributes:
      runner: as given.
      placed_bytes: that wait on the devices now.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sink: PageKeeper | None = None,
        sources: Mapping[str, PageSource] | None = None,
        *,
        step_bytes: int = 64 << 20,
        placed_bytes: int = PLACED_BYTES,
        read_bytes: int = 256 << 20,
        deadline: float = 30.0,
        has_window: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = MoverStats()
        self.sink, self.sources = sink, {} if sources is None else sources
        self.runner, self._clock, self._deadline, self._has_window = runner, clock, deadline, has_window
        self._step_bytes, self._max_placed, self._max_read = step_bytes, placed_bytes, read_bytes
        self._reads: weakref.WeakSet[DevicePageRead] = weakref.WeakSet()
        self._loads: dict[str, _Load] = {}
        self._lock = threading.Lock()  # of `_loads` and `_retired`, and of `placed` and `placed_bytes`
        self._retired: list[_Load] = []
        self.placed_bytes = 0
        self._news, self._arrived = threading.Event(), threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def warm_up(self) -> None:
        """Compile what moves pages, read one and write it back; while no step runs."""
        self.runner.transfer.compile()
        layout, windows = self.runner.transfer.layout, ([0],) if self._has_window else ()
        for block in self.runner.read_pages([0], (0, layout.num_layers), *windows).result():
            self.runner.write_pages([0], block, *windows)

    def submit(self, batch: Batch) -> None:
        """Do what comes before a batch's step: end loads, begin to read pages, begin loads."""
        for name in batch.dropped:
            if name in self._loads:
                self._retire(name)
        if batch.stores:
            self._store(batch.stores)
        now = self._clock()
        for request in batch.loads:
            assert request.name not in self._loads, f"{request.name} loads already"
            transfer = self.runner.transfer
            missing = MissingParts(transfer.needed(request.pages, request.windows), transfer.layout.whole)
            with self._lock:
                self._loads[request.name] = _Load(request, self.sources.get(request.source), now, missing, now)
        if batch.loads:
            self._begin_thread()
            self._news.set()

    def poll(self, timeout: float = 0.0) -> list[Loaded]:
        """Write blocks that have come; returns the loads that have ended.

        Args:
          timeout: seconds to wait for the end of a load, if there are loads. 0: a step follows, and is not to be
            delayed by more than `step_bytes`.
        """
        until = self._clock() + timeout
        while True:
            self._arrived.clear()
            ended = self._write(self._max_placed if timeout > 0 else self._step_bytes)
            left = until - self._clock()
            if ended or not self._loads or left <= 0:
                return ended
            late = min(map(self._late_at, self._loads.values())) - self._clock()
            self._arrived.wait(max(0.0, min(left, late)))

    def interrupt(self) -> None:
        """Let `poll` look again, and the thread; any thread may call it."""
        self._news.set()
        self._arrived.set()

    def close(self) -> None:
        """End all loads, and the thread; it waits for what it is sending."""
        for name in list(self._loads):
            self._retire(name)
        self._is_closed = True
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    def _store(self, stores: List[PageStore]) -> None:
        layout, stats = self.runner.transfer.layout, self.stats
        if self.sink is None:
            return
        try:
            wanted = self.sink.wanted(stores)
        except Exception:
            logger.exception("a sink of pages can't tell what it wants")
            wanted = []
        outstanding = sum(read.num_bytes for read in self._reads)
        kept = wanted[: max(not outstanding, (self._max_read - outstanding) // layout.page_bytes)]
        stats.dropped_stores += len(wanted) - len(kept)
        if not kept:
            return
        windows = ([store.window for store in kept if store.window is not None],) if self._has_window else ()
        read = self.runner.read_pages([store.page for store in kept], (0, layout.num_layers), *windows)
        self._reads.add(read)
        try:
            self.sink.put(kept, read)
        except Exception:
            logger.exception("%d pages could not be stored", len(kept))
            stats.dropped_stores += len(kept)
        else:
            stats.stored_pages += len(kept)
            stats.stored_bytes += read.num_bytes

    def _write(self, budget: int) -> list[Loaded]:
        """Write placed blocks, those of the oldest load first, and end what is over."""
        ended = []
        for load in list(self._loads.values()):
            is_over = load.is_over  # before `placed` is emptied: the thread sets it last
            blocks, size = self._take_placed(load, budget)
            if blocks:
                budget -= size
                if (written := self.runner.write_placed([placed for _, placed, _ in blocks])) is not None:
                    load.written.append(written)
                for block, _, _ in blocks:
                    load.missing.add(block)
                self.stats.loaded_bytes += size
            now = self._clock()
            is_late = now > self._late_at(load)
            if not load.placed and (is_over or is_late):
                ended.append(self._end(load, now, is_late and not is_over))
        return ended

    def _late_at(self, load: _Load) -> float:
        """Return when a load ends if no block comes before: its source may know that it takes longer."""
        return load.last_block + max(self._deadline, getattr(load.source, "page_timeout", 0.0))

    def _take_placed(self, load: _Load, budget: int) -> tuple[list[tuple[PageBlock, Any, int]], int]:
        blocks, size = [], 0
        with self._lock:
            while load.placed and size < budget:
                blocks.append(load.placed.popleft())
                size += blocks[-1][2]
            was_full = self.placed_bytes >= self._max_placed
            self.placed_bytes -= size
        if was_full and size:
            self._news.set()
        return blocks, size

    def _end(self, load: _Load, now: float, is_late: bool) -> Loaded:
        try:
            count = load.num_pages
        except Exception:
            logger.exception("a load of %d pages can't tell what came", len(load.request.pages))
            count, load.failed = 0, True
        self.stats.loads += 1
        self.stats.loaded_pages += count
        self.stats.short_loads += count < len(load.request.pages)
        self.stats.failed_loads += load.failed
        self.stats.late_loads += is_late
        self._retire(load.request.name)
        return Loaded(load.request.name, count, now - load.begun)

    def _retire(self, name: str) -> None:
        """Retire a load that is no longer wanted: the thread closes it."""
        with self._lock:
            load = self._loads.pop(name)
            load.is_done = True
            self.placed_bytes -= sum(size for _, _, size in load.placed)
            load.placed.clear()
            self._retired.append(load)
        self._news.set()

    # The thread.

    def _begin_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="longctx-pages", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not (self._is_closed and not self._retired):
            self._news.wait()
            self._news.clear()
            with self._lock:
                loads = list(self._loads.values())
            for load in loads:
                if not (load.is_over or load.is_done):
                    self._place(load)
            self._close_retired()

    def _place(self, load: _Load) -> None:
        """Take what has come for a load, and send it to the devices."""
        try:
            if load.fetch is None:
                if load.source is None:
                    raise ValueError(f"load from {load.request.source!r}, which is unknown")
                load.fetch = self._fetch(load.source, load.request)
            while not load.is_done and (room := self._max_placed - self.placed_bytes) > 0:
                blocks = load.fetch.take(room)
                if not blocks:
                    load.is_over = load.fetch.is_over
                    break
                for block in blocks:
                    self._place_block(load, block)
            else:
                load.last_block = self._clock()  # it waits for room, and not for a block
        except Exception as error:
            logger.warning("a load of %d pages failed: %s: %s", len(load.request.pages), type(error).__name__, error)
            load.failed = load.is_over = True
        if load.is_over:
            self._arrived.set()

    def _fetch(self, source: PageSource, request: PageLoad) -> PageFetch:
        """Begin to fetch pages; what layers with a window don't need is not asked of other engines."""
        if request.windows is None or not isinstance(source, LeasedSource):
            return source.fetch(request.keys, self._news.set)
        return source.fetch(request.keys, self._news.set, self.runner.transfer.needed_of(request.windows))

    def _place_block(self, load: _Load, block: PageBlock) -> None:
        placed = self.runner.transfer.place(load.request.pages, block, load.request.windows)
        size = block.data.nbytes
        with self._lock:
            if not load.is_done:
                load.placed.append((block, placed, size))
                self.placed_bytes += size
                load.last_block = self._clock()
        self._arrived.set()

    def _close_retired(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
        for load in retired:
            try:
                for wait in load.written:
                    wait()
                if load.fetch is not None:
                    load.fetch.close()
            except Exception:
                logger.exception("a load could not be closed")
