"""Pages that another server is still computing: `PendingSource`, and `StagedPages` on their way to host memory.

Source: Mooncake, section 3 (steps 3 and 4): pages are received in the DRAM of the decoding node, and are loaded
asynchronously when the request joins a batch.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import numpy as np

from longctx.serving.kv_cache.connector import WHOLE, LeasedSource, Needed, PageBlock, PageFetch, PageStore
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.request.handoff import Handoff

_LOG = logging.getLogger(__name__)
_SILENCE_TIMEOUT = 30.0  # seconds without a page after which the rest is computed, if the source allows no more
_TAKEN_BYTES = 64 << 20  # at a time
_POLL, _PUT_SECONDS = 0.005, 10.0  # while the host memory's queue takes pages, and for how long it may


class PendingSource:
    """`LeasedSource` of pages whose sender is known later. Any thread may call it.

    It is the `PageFetch` of its first fetch; another one ends at once, with nothing.

    Args:
      cancel: is called when the pages are not needed any more and have not all come. It must not wait.
      releases: whether the end of this releases the pages at their sender.

    Attributes:
      page_timeout: seconds for which the engine waits for the next page, see `PageMover`: the prompt may have to queue.
    """

    def __init__(self, cancel: Callable[[], object], releases: bool = True) -> None:
        self._cancel, self._releases = cancel, releases
        self._lock = threading.Lock()  # of all that follows
        self._source: LeasedSource | None = None
        self._keys: list[Key] | None = None  # that are fetched
        self._wake: Callable[[], Any] = lambda: None
        self._needed = WHOLE
        self._inner: PageFetch | None = None
        self._is_over = self._has_come = False
        self.page_timeout = 30.0

    # The engine calls these.

    def fetch(self, keys: List[Key], wake: Callable[[], Any], needed: Needed = WHOLE) -> PageFetch:
        with self._lock:
            if self._keys is not None:
                return _NoPages()
            self._keys, self._wake, self._needed = list(keys), wake, needed
            self._inner = None if self._source is None else self._source.fetch(self._keys, wake, needed)
        return self

    def release(self) -> None:
        """End it: the pages are not needed, or are all there."""
        with self._lock:
            self._is_over, inner = True, self._inner
            source, self._source = self._source, None
        if inner is None or inner.num_pages < len(self._keys or ()):  # else what computes them is about to end
            self._cancel()
        if source is not None and self._releases:
            source.release()
        self._wake()

    def take(self, max_bytes: int) -> list[PageBlock]:
        with self._lock:
            blocks = [] if self._inner is None else self._inner.take(max_bytes)
            self._has_come = self._has_come or bool(blocks)
        return blocks

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._is_over or (self._inner is not None and self._inner.is_over)

    @property
    def num_pages(self) -> int:
        inner = self._inner
        return 0 if inner is None else inner.num_pages

    def close(self) -> None:
        """End the fetch, and what computes the pages unless all have come."""
        inner = self._inner
        if inner is None or inner.num_pages < len(self._keys or ()):
            self.release()
        if inner is not None:
            inner.close()

    # Whoever finds the sender calls these.

    def begin(self, source: LeasedSource, page_timeout: float) -> bool:
        """Take pages from their sender; False: they are not needed any more, or have a sender.

        Args:
          source: of the pages.
          page_timeout: seconds after which the engine gives up if no page has come.
        """
        with self._lock:
            if self._is_over or self._source is not None:
                return False
            self._source, self.page_timeout = source, page_timeout
            if self._keys is not None:
                self._inner = source.fetch(self._keys, self._wake, self._needed)
        self._wake()
        return True

    def settle(self, has_failed: bool = False) -> None:
        """End it if it has no sender, or one that `has_failed` before it sent a page: none will come."""
        with self._lock:
            self._is_over = self._is_over or self._source is None or (has_failed and not self._has_come)
        self._wake()


def _from_page(block: PageBlock, first: int) -> PageBlock:
    """Return the pages of a block from page `first` on, which counts as 0.

    A block may begin before it: of an engine in several processes one may be ahead of the others.
    """
    skipped = max(0, first - block.first)
    return block._replace(first=block.first + skipped - first, data=block.data[skipped:])


class _NoPages:
    """`PageFetch` without pages."""

    is_over, num_pages = True, 0

    def take(self, max_bytes: int) -> list[PageBlock]:
        return []

    def close(self) -> None:
        pass


class StagedPages:
    """Pages of one prompt on their way to the host tier of an engine, before their request enters it.

    Args:
      store: the tiers.
      source: of the pages.
      pages: in order; `page` of each is not used.
      loop: runs `run`.

    Attributes:
      ready: ends when all pages are in host memory that will come. Those that did not come are computed.
      handoff, sources: there are none.
    """

    handoff: Handoff | None = None
    sources: Mapping[str, LeasedSource] = MappingProxyType({})

    def __init__(
        self, store: TieredStore, source: LeasedSource, pages: List[PageStore], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.ready: Future[None] = Future()
        self._store, self._source, self._pages, self._loop = store, source, list(pages), loop
        self._blocks: list[PageBlock] = []
        self._is_released = False
        self._woken = asyncio.Event()

    @property
    def num_pages(self) -> int:
        """Number of pages that are to come."""
        return len(self._pages)

    def release(self) -> None:
        """Stop: the request has ended. Pages that are there stay in the tier; it may be called from any thread."""
        self._is_released = True
        self._source.release()
        self._wake()

    async def run(self) -> None:
        """Receive the pages."""
        fetch = self._source.fetch([each.key for each in self._pages], self._wake)
        heard, done = time.monotonic(), 0
        try:
            while not self._is_released:
                self._woken.clear()
                timeout = max(_SILENCE_TIMEOUT, getattr(self._source, "page_timeout", 0.0))
                if blocks := fetch.take(_TAKEN_BYTES):
                    heard = time.monotonic()
                    # The queue of the tier may read them after the fetch, whose memory they are in, has been closed.
                    self._blocks += [each._replace(data=np.array(each.data)) for each in blocks]
                    if fetch.num_pages > done:
                        await self._keep(done, done := fetch.num_pages)
                elif fetch.is_over or time.monotonic() - heard > timeout:
                    return
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await self._woken.wait()
        except Exception:
            _LOG.exception("longctx: pages of a prompt could not be brought to host memory")
        finally:
            fetch.close()
            self._source.release()
            self.ready.set_result(None)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._woken.set)

    async def _keep(self, first: int, stop: int) -> None:
        """Put complete pages into host memory; the queue there takes a part of them at a time."""
        read: Future[list[PageBlock]] = Future()
        read.set_result([_from_page(each, first) for each in self._blocks])
        pages, until = self._pages[first:stop], time.monotonic() + _PUT_SECONDS
        while any(self._store.tier_of(each.key) is None for each in pages):
            if self._is_released or time.monotonic() > until:
                break
            self._store.put(pages, read)  # those that are there, or on their way, are left out
            await asyncio.sleep(_POLL)
        self._blocks = [each for each in self._blocks if each.first + len(each.data) > stop]
