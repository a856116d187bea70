"""A store of pages in memory, whose loads go wrong in ways that a test chooses."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from longctx.serving.kv_cache.connector import PageBlock, PageRead, PageStore, assemble
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice


class MemoryFetch:
    """A fetch that a test, or a thread, fills by `give`."""

    def __init__(self, keys: List[bytes], wake: Callable[[], object]) -> None:
        self.keys, self.wake = keys, wake
        self.blocks: list[PageBlock] = []
        self.num_pages = self.num_taken = self.num_closed = 0
        self.is_ended = False
        self.error: Exception | None = None
        self.lock = threading.Lock()

    def give(self, *blocks: PageBlock, num_pages: int | None = None, end: bool = False) -> None:
        with self.lock:
            self.blocks += blocks
            self.is_ended = end
            if num_pages is not None:
                self.num_pages = num_pages
        self.wake()

    def take(self, max_bytes: int) -> list[PageBlock]:
        assert not self.num_closed, "a closed fetch is asked for more"
        with self.lock:
            if self.error is not None:
                raise self.error
            taken, size = [], 0
            while self.blocks and (not taken or size + self.blocks[0].data.nbytes <= max_bytes):
                taken.append(self.blocks.pop(0))
                size += taken[-1].data.nbytes
            self.num_taken += len(taken)
            return taken

    @property
    def is_over(self) -> bool:
        with self.lock:
            return self.is_ended and not self.blocks

    def close(self) -> None:
        self.num_closed += 1


class MemoryStore:
    """Keeps payloads of pages by key, and gives them in blocks of some pages and layers, each in a thread of its own.

    Args:
      split: makes blocks of the payload of pages `[pages, layers, 2, page_size, K, H]`.
    """

    def __init__(self, layout: PageLayout, split: Callable[[np.ndarray], list[PageBlock]] | None = None) -> None:
        self.layout, self.pages = layout, dict[bytes, np.ndarray]()
        self.split = split or (lambda data: [PageBlock(0, layout.whole, data)])
        self.fetches: list[MemoryFetch] = []
        self.reads: list[PageRead] = []

    def ask_ahead(self, keys: List[bytes]) -> None:
        pass

    def look_up(self, keys: List[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def wanted(self, stores: List[PageStore]) -> list[PageStore]:
        return [store for store in stores if store.key not in self.pages]

    def put(self, stores: List[PageStore], read: PageRead) -> None:
        def keep() -> None:
            data = np.zeros((len(stores), *self.layout.shape), self.layout.bits)
            assemble(read.result(), data, self.layout.whole)
            self.pages |= {store.key: page for store, page in zip(stores, data, strict=True)}

        thread = threading.Thread(target=keep)
        thread.start()
        thread.join()

    def fetch(self, keys: List[bytes], wake: Callable[[], object]) -> MemoryFetch:
        fetch = MemoryFetch(keys, wake)
        self.fetches.append(fetch)

        def give() -> None:
            data = np.stack([self.pages[key] for key in keys])
            for block in self.split(data):
                fetch.give(block, num_pages=len(keys))
            fetch.give(end=True)

        threading.Thread(target=give).start()
        return fetch

    def flush(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        pass


def split_by(layout: PageLayout, pages: int, layers: int, heads: int) -> Callable[[np.ndarray], list[PageBlock]]:
    """Blocks of so many pages, layers and heads at most, the last ones first."""

    def ranges(size: int, step: int) -> Any:
        return [(first, min(first + step, size)) for first in range(0, size, step)]

    def split(data: np.ndarray) -> list[PageBlock]:
        blocks = [
            PageBlock(p[0], PageSlice(layer, head), data[slice(*p), slice(*layer), :, :, slice(*head)])
            for p in ranges(len(data), pages)
            for layer in ranges(layout.num_layers, layers)
            for head in ranges(layout.num_kv_heads, heads)
        ]
        return blocks[::-1]

    return split
