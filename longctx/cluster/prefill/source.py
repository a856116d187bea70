"""Pages of a prompt that another server computes: `RemotePrefill`, and `StagedPages` on their way to host memory.

Source: Mooncake, section 3 (steps 3 and 4): pages are received in the DRAM of the decoding node, and are loaded
asynchronously when the request joins a batch.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from concurrent.futures import Future
from typing import Any

import numpy as np

from longctx.serving.kv_cache.connector import LeasedSource, PageBlock, PageFetch, PageStore
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.store import TieredStore

_LOG = logging.getLogger(__name__)
_SILENCE_TIMEOUT = 30.0  # seconds without a page after which the rest is computed, if the source allows no more
_TAKEN_BYTES = 64 << 20  # at a time
_POLL, _PUT_SECONDS = 0.005, 10.0  # while the host memory's queue takes pages, and for how long it may


class RemotePrefill:
    """`LeasedSource` of pages that come from one server after the other, until one has sent a page.

    It is the `PageFetch` of its first fetch; another one ends at once, with nothing. Any thread may call it.

    Args:
      cancel: ends the prefill, wherever it is. It must not wait.

    Attributes:
      page_timeout: seconds for which the engine waits for the next page, see `PageMover`: the prompt may have to queue.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()  # of all that follows
        self._source: LeasedSource | None = None
        self._keys: list[Key] | None = None  # that are fetched
        self._wake: Callable[[], Any] = lambda: None
        self._inner: PageFetch | None = None
        self._is_settled = self._is_over = self._is_complete = False
        self.page_timeout = 30.0

    # The engine calls these.

    def fetch(self, keys: List[Key], wake: Callable[[], Any]) -> PageFetch:
        with self._lock:
            if self._keys is not None:
                return _NoPages()
            self._keys, self._wake = list(keys), wake
            self._inner = None if self._source is None else self._source.fetch(self._keys, wake)
        return self

    def release(self) -> None:
        """End the prefill: the pages are not needed, or are all there."""
        with self._lock:
            self._is_over = self._is_settled = True
            source, self._source = self._source, None
        if not self._is_complete:  # else it is about to end
            self._cancel()
        if source is not None:
            source.release()
        self._wake()

    def take(self, max_bytes: int) -> list[PageBlock]:
        with self._lock:
            if self._inner is None:
                return []
            blocks = self._inner.take(max_bytes)
            self._is_settled = self._is_settled or bool(blocks)
            is_useless = not blocks and self._inner.is_over and not self._is_settled
        if is_useless:  # its pages don't come, whatever it computes
            self._cancel()
        return blocks

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._is_over or (self._is_settled and (self._inner is None or self._inner.is_over))

    @property
    def num_pages(self) -> int:
        inner = self._inner
        return 0 if inner is None else inner.num_pages

    def close(self) -> None:
        """End the fetch, and the prefill unless all pages have come."""
        with self._lock:
            inner = self._inner
            self._is_complete = inner is not None and inner.num_pages == len(self._keys or ())
        if not self._is_complete:
            self.release()
        if inner is not None:
            inner.close()

    # The dispatcher calls these.

    def begin(self, source: LeasedSource, page_timeout: float) -> bool:
        """Take pages from a server that is about to be asked; False: they are not needed any more.

        Args:
          page_timeout: seconds after which the engine gives up if no page has come.
        """
        self.page_timeout = page_timeout
        with self._lock:
            if self._is_over:
                return False
            self._source = source
            if self._keys is not None:
                self._inner = source.fetch(self._keys, self._wake)
        self._wake()
        return True

    def end(self) -> bool:
        """Leave a server that has refused or failed; returns whether another may be asked: this one sent no page."""
        with self._lock:
            if self._is_settled:
                return False
            source, self._source = self._source, None
            inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()
        if source is not None:
            source.release()
        return True

    def settle(self) -> None:
        """Note that no other server will be asked."""
        with self._lock:
            self._is_settled = True
        self._wake()


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
      store: the tiers. source: of the pages.
      pages: in order; `page` of each is not used.
      call: calls something in the loop that runs `run`.

    Attributes:
      ready: ends when all pages are in host memory that will come. Those that did not come are computed.
    """

    def __init__(
        self,
        store: TieredStore,
        source: LeasedSource,
        pages: List[PageStore],
        call: Callable[[Callable[[], object]], object],
    ) -> None:
        self.ready: Future[None] = Future()
        self._store, self._source, self._pages, self._call = store, source, list(pages), call
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
        self._call(self._woken.set)

    async def run(self) -> None:
        """Receive the pages, in the loop of `call`."""
        fetch = self._source.fetch([each.key for each in self._pages], lambda: self._call(self._woken.set))
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

    async def _keep(self, first: int, stop: int) -> None:
        """Put complete pages into host memory; the queue there takes a part of them at a time."""
        read: Future[list[PageBlock]] = Future()
        read.set_result([each._replace(first=each.first - first) for each in self._blocks])
        pages, until = self._pages[first:stop], time.monotonic() + _PUT_SECONDS
        while any(self._store.tier_of(each.key) is None for each in pages):
            if self._is_released or time.monotonic() > until:
                break
            self._store.put(pages, read)  # those that are there, or on their way, are left out
            await asyncio.sleep(_POLL)
        self._blocks = [each for each in self._blocks if each.first + len(each.data) > stop]
