"""`StagedPages`: pages of another server on their way to host memory."""

import asyncio
from typing import Any

import numpy as np
from tier_pages import LAYOUT, chain, contents, load, make_store, stores_of

from longctx.cluster.pending_pages import StagedPages
from longctx.serving.kv_cache.connector import WHOLE, MissingParts, PageBlock
from longctx.serving.kv_cache.page_layout import PageSlice


class BlockSource:
    """`LeasedSource` and `PageFetch` whose blocks come one at a time."""

    def __init__(self, num_pages: int, blocks: list[PageBlock]) -> None:
        self._blocks, self._missing = list(blocks), MissingParts.of(num_pages, LAYOUT.whole)

    def fetch(self, keys: list[bytes], wake: Any, needed: Any = WHOLE) -> "BlockSource":
        return self

    def take(self, max_bytes: int) -> list[PageBlock]:
        taken, self._blocks = self._blocks[:1], self._blocks[1:]
        for block in taken:
            self._missing.add(block)
        return taken

    @property
    def is_over(self) -> bool:
        return not self._blocks

    @property
    def num_pages(self) -> int:
        return self._missing.num_leading

    def close(self) -> None:
        pass

    def release(self) -> None:
        pass


def test_pages_are_right_where_one_process_of_the_sender_is_ahead() -> None:
    """A block of one stage has pages of which those of the other stage come in two blocks."""
    keys, (first, second) = chain("a", 6), (PageSlice((0, 2), (0, 4)), PageSlice((2, 3), (0, 4)))
    pages = np.stack([contents(key) for key in keys])
    places = [(first, 0, 4), (second, 0, 3), (second, 3, 5), (first, 4, 6), (second, 5, 6)]
    blocks = [PageBlock(start, part, pages[start:stop, slice(*part.layers)]) for part, start, stop in places]

    async def stage() -> None:
        staged = StagedPages(store, BlockSource(len(keys), blocks), stores_of(keys), asyncio.get_running_loop())
        await staged.run()

    store = make_store()
    try:
        asyncio.run(stage())
        assert store.flush(20)
        assert load(store, keys) == len(keys)  # which compares them, too
    finally:
        store.close()
