"""Which pages of a load are there in full, when blocks of them come in any order."""

import numpy as np

from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageSlice


class Coverage:
    """Which layers and KV heads of each page have come, of the part `want`."""

    def __init__(self, num_pages: int, want: PageSlice) -> None:
        layers, heads = (stop - first for first, stop in want)
        self._want = want
        self._has = np.zeros((num_pages, layers, heads), bool)
        self._num_pages = 0

    def add(self, block: PageBlock) -> None:
        """Count a block, which lies within the load and the wanted part."""
        layers, heads = block.part.within(self._want)
        self._has[block.first : block.first + len(block.data), layers, heads] = True
        while self._num_pages < len(self._has) and self._has[self._num_pages].all():
            self._num_pages += 1

    @property
    def num_pages(self) -> int:
        """Leading pages that are there in full."""
        return self._num_pages

    @property
    def is_complete(self) -> bool:
        return self._num_pages == len(self._has)
