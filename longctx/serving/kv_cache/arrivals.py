"""Pages that have come and wait for the engine: the receiving end of tiers and of every way of transfer."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageSlice


class MissingParts:
    """Layers and KV heads of some pages that have not come yet.

    Args:
      missing: bool `[pages, layers, KV heads]`.
      part: that these layers and heads are of the model's.
    """

    def __init__(self, missing: np.ndarray, part: PageSlice) -> None:
        self._missing, self._part = missing, part

    @classmethod
    def of(cls, num_pages: int, part: PageSlice) -> "MissingParts":
        """All of a part of some pages."""
        layers, heads = (stop - first for first, stop in part)
        return cls(np.ones((num_pages, layers, heads), bool), part)

    def add(self, block: PageBlock) -> None:
        """Note that a block has come."""
        if (common := block.part.intersect(self._part)) is not None:
            layers, heads = common.within(self._part)
            self._missing[block.first : block.first + len(block.data), layers, heads] = False

    @property
    def complete(self) -> np.ndarray:
        """Whether all of each page has come, bool `[pages]`."""
        return np.logical_not(np.any(self._missing, axis=(1, 2)))

    @property
    def num_leading(self) -> int:
        """Leading pages of which all has come."""
        return int(np.append(self.complete, False).argmin())


def assemble(
    blocks: Sequence[PageBlock], outs: Sequence[np.ndarray | None] | np.ndarray, part: PageSlice
) -> list[bool]:
    """Copy the pages of blocks into arrays `[layers, 2, page_size, heads, row_size]` of `part`; which are complete.

    `None`: the page is left out.
    """
    missing = MissingParts.of(len(outs), part)
    for block in blocks:
        if (common := block.part.intersect(part)) is None:
            continue
        (layers, heads), (from_layers, from_heads) = common.within(part), common.within(block.part)
        for out, source in zip(outs[block.first :], np.asarray(block.data), strict=False):
            if out is not None:
                out[layers, :, :, heads] = source[from_layers, :, :, from_heads].view(out.dtype)
        missing.add(block)
    return missing.complete.tolist()


class Arrivals:
    """`PageFetch` that threads of a tier or a transfer fill, in any order of blocks.

    Args:
      num_pages: of the load. want: the part of them that is fetched.
      wake: called when blocks have come, and at the end.
      on_taken: called with the tag of each block that the engine has taken, or will not take.
      on_close: called once, when the engine closes the fetch.
      on_outcome: called once, with how it ended.

    Attributes:
      outcome: how it ended; None: it has not. `complete`: all pages came. `dropped`: it was closed before.
      num_come: leading pages of which all has come.
    """

    def __init__(
        self,
        num_pages: int,
        want: PageSlice,
        wake: Callable[[], Any],
        on_taken: Callable[[Any], None],
        on_close: Callable[[], None],
        on_outcome: Callable[[Any], None],
    ) -> None:
        self._wake, self._on_taken, self._on_close, self._on_outcome = wake, on_taken, on_close, on_outcome
        self._lock = threading.Lock()
        self._total, self._missing = num_pages, MissingParts.of(num_pages, want)
        self.num_come = self._num_taken = 0
        self._blocks: deque[tuple[PageBlock, Any, int]] = deque()  # with their tags, and `num_come` after them
        self._is_closed = False
        self.outcome: Any = None

    def put(self, block: PageBlock, tag: Any = None) -> bool:
        """Add a block that was checked; returns False if it has ended before."""
        with self._lock:
            if self._is_closed or self.outcome is not None:
                return False
            self._missing.add(block)
            self.num_come = self._missing.num_leading
            self._blocks.append((block, tag, self.num_come))
            if self.num_come == self._total:
                self._set_outcome("complete")
        self._wake()
        return True

    def end(self, outcome: str) -> None:
        """Note that no more blocks will come. The first call counts."""
        with self._lock:
            if self.outcome is not None:
                return
            self._set_outcome(outcome)
        self._wake()

    def take(self, max_bytes: int) -> list[PageBlock]:
        taken: list[PageBlock] = []
        tags = []
        with self._lock:
            while self._blocks and (not taken or self._blocks[0][0].data.nbytes <= max_bytes):
                block, tag, self._num_taken = self._blocks.popleft()
                max_bytes -= block.data.nbytes
                taken.append(block)
                tags.append(tag)
        for tag in tags:
            self._on_taken(tag)
        return taken

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._is_closed or (self.outcome is not None and not self._blocks)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_pages(self) -> int:
        return self._num_taken

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self.outcome is None:
                self._set_outcome("dropped")
            tags = [tag for _, tag, _ in self._blocks]
            self._blocks.clear()
        for tag in tags:
            self._on_taken(tag)
        self._on_close()

    def _set_outcome(self, outcome: str) -> None:
        self.outcome = outcome
        self._on_outcome(outcome)
