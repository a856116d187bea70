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
    """Fake devices that store and load pages: a load takes some polls, and its pages hold rubbish meanwhile."""

    def __init__(self, config: EngineConfig, plan: ParallelPlan, num_pages: int, store: FakeStore) -> None:
        super().__init__(config, plan, num_pages)
        self.store = store
        self.num_stored = self.num_loaded = self.num_short = 0
        self._per_rank = num_pages
        self._loads: dict[str, tuple[PageLoad, int]] = {}
        self.sources: dict[str, Any] = {}

    def submit(self, batch: Batch) -> Pending:
        pages: Any = self.runner.pages  # type: ignore[attr-defined]  # [stage, rank, page, offset]
        for name in batch.dropped:
            self._loads.pop(name, None)  # it may have ended meanwhile
        for store in batch.stores:
            rank, page = divmod(store.page, self._per_rank)
            tokens = pages[:, rank, page].copy()
            assert (tokens == tokens[0]).all(), "a page is stored before it is complete in all stages"
            known = self.store.pages.setdefault(store.key, tokens[0])
            assert (known == tokens[0]).all(), "a page is stored under the key of another"
            self.num_stored += 1
        for load in batch.loads:
            assert load.name not in self._loads
            assert len(load.keys) == len(load.pages)
            self._loads[load.name] = load, self.store.random.randrange(6)
            for page in load.pages:
                pages[:, page // self._per_rank, page % self._per_rank] = LOST
        return super().submit(batch)

    def poll_loads(self, timeout: float = 0.0) -> list[Loaded]:
        pages: Any = self.runner.pages  # type: ignore[attr-defined]
        ended = []
        for name, (load, polls) in list(self._loads.items()):
            if polls and not timeout:
                self._loads[name] = load, polls - 1
                continue
            del self._loads[name]
            count = 0
            source = self.store if load.source == "tiers" else self.sources.get(load.source)
            for key, page in zip(load.keys, load.pages, strict=True):
                if source is None or key not in source.pages or self.store.random.random() < self.store.loses:
                    self.num_short += 1
                    break
                pages[:, page // self._per_rank, page % self._per_rank] = source.pages[key]
                count += 1
            self.num_loaded += count
            ended.append(Loaded(name, count, 0.0))
        return ended

    def read_pages(self, pages: List[int], layers: tuple[int, int]) -> Any:
        all_pages: Any = self.runner.pages  # type: ignore[attr-defined]
        data = [all_pages[:, page // self._per_rank, page % self._per_rank].copy() for page in pages]
        return _Read(np.stack(data))


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
        assert (data[:, : lease.length] == data[0, : lease.length]).all(), "a page is read before it is complete"
        self.pages = dict(zip(lease.keys, blocks[0].data[:, 0], strict=True))
        engine.pages.release(lease_id)

    def release(self) -> None:
        pass
