"""Pages of a load that come from tiers: what loaders fill and the engine's thread empties."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.host_memory import HostPage


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
