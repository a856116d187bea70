"""Pages that have come and wait for the engine: the receiving end of tiers and of every way of transfer."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from longctx.serving.kv_cache.connector import MissingParts, PageBlock
from longctx.serving.kv_cache.page_layout import PageSlice


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
