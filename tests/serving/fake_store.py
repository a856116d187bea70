"""Fake devices with a store of pages beyond them: what it is given is tokens, and what it gives back may come short."""

import random
from collections.abc import Sequence as List
from typing import Any

import numpy as np
from fake_device import FakeExecutor

from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.executor.executor import Pending
from longctx.serving.kv_cache.connector import Loaded, PageBlock, PageLoad
from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.scheduler.batch import Batch

LOST = -7  # a token that nobody may see


class FakeStore:
    """Keeps the tokens of pages by their keys.

    Args:
      loses: the share of what it has that it turns out not to have.
    """

    def __init__(self, loses: float = 0.0, seed: int = 0) -> None:
        self.pages: dict[bytes, np.ndarray] = {}
        self.loses, self.random = loses, random.Random(seed)
        self.looked_up = 0

    def ask_ahead(self, keys: List[bytes]) -> None:
        pass

    def look_up(self, keys: List[bytes]) -> int:
        self.looked_up += 1
        missing = (i for i, key in enumerate(keys) if key not in self.pages)
        return next(missing, len(keys))

    def close(self) -> None:
        pass


class StoringExecutor(FakeExecutor):
    """Fake devices that store and load pages: a load takes some polls, and its pages hold rubbish meanwhile.

    With a window what is stored of a page is its tokens, and then those of its window page.
    """

    def __init__(
        self, config: EngineConfig, plan: ParallelPlan, num_pages: int, store: FakeStore, window: int | None = None
    ) -> None:
        super().__init__(config, plan, num_pages, window=window)
        self.store = store
        self.num_stored = self.num_loaded = self.num_short = 0
        self._per_rank = num_pages
        self._loads: dict[str, tuple[PageLoad, int]] = {}
        self.sources: dict[str, Any] = {}

    def _page(self, page: int) -> Any:
        pages: Any = self.runner.pages  # type: ignore[attr-defined]  # [stage, rank, page, offset]
        return pages[:, page // self._per_rank, page % self._per_rank]

    def _window_page(self, window: int) -> Any:
        pages: Any = self.runner.window_pages  # type: ignore[attr-defined]
        return pages[:, window // pages.shape[2], window % pages.shape[2]]

    def _read(self, page: int, window: int | None) -> Any:
        tokens = self._page(page).copy()
        if window is None:
            return tokens
        kept = np.full_like(tokens, LOST) if window < 0 else self._window_page(window)
        return np.concatenate([tokens, kept], 1)

    def submit(self, batch: Batch) -> Pending:
        for name in batch.dropped:
            self._loads.pop(name, None)  # it may have ended meanwhile
        for store in batch.stores:
            tokens = self._read(store.page, store.window)
            assert (tokens == tokens[0]).all(), "a page is stored before it is complete in all stages"
            known = self.store.pages.setdefault(store.key, tokens[0])
            assert (known == tokens[0]).all(), "a page is stored under the key of another"
            self.num_stored += 1
        for load in batch.loads:
            assert load.name not in self._loads
            assert len(load.keys) == len(load.pages)
            self._loads[load.name] = load, self.store.random.randrange(6)
            for page in load.pages:
                self._page(page)[:] = LOST
            for window in load.windows or ():
                if window >= 0:
                    self._window_page(window)[:] = LOST
        return super().submit(batch)

    def poll_loads(self, timeout: float = 0.0) -> list[Loaded]:
        ended = []
        for name, (load, polls) in list(self._loads.items()):
            if polls and not timeout:
                self._loads[name] = load, polls - 1
                continue
            del self._loads[name]
            count = 0
            source = self.store if load.source == "tiers" else self.sources.get(load.source)
            size, windows = self._config.page_size, load.windows or [-1] * len(load.pages)
            for key, page, window in zip(load.keys, load.pages, windows, strict=True):
                if source is None or key not in source.pages or self.store.random.random() < self.store.loses:
                    self.num_short += 1
                    break
                self._page(page)[:] = source.pages[key][:size]
                if window >= 0:
                    self._window_page(window)[:] = source.pages[key][size:]
                count += 1
            self.num_loaded += count
            ended.append(Loaded(name, count, 0.0))
        return ended

    def read_pages(self, pages: List[int], layers: tuple[int, int], windows: List[int] | None = None) -> Any:
        named = [None] * len(pages) if windows is None else windows
        return _Read(np.stack([self._read(*each) for each in zip(pages, named, strict=True)]))


class _Read:
    """Pages that have been read: the tokens `[pages, stages, page_size]`."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def result(self) -> list[PageBlock]:
        return [PageBlock(0, PageSlice((0, 1), (0, 1)), self.data)]


class LeaseSource:
    """The pages of an engine's lease, as another engine's source."""

    def __init__(self, engine: Engine, lease_id: str) -> None:
        lease = engine.pages.lease(lease_id)
        blocks = engine.pages.read(lease_id, 0, len(lease.pages), (0, 1)).result()
        data = np.moveaxis(blocks[0].data, 1, 0).reshape(blocks[0].data.shape[1], -1)
        is_last = lease.windows and lease.length % engine.config.page_size  # then not every token of it is known
        if not is_last:
            assert (data[:, : lease.length] == data[0, : lease.length]).all(), "a page is read before it is complete"
        self.pages = dict(zip(lease.keys, blocks[0].data[:, 0], strict=True))
        engine.pages.release(lease_id)

    def release(self) -> None:
        pass
