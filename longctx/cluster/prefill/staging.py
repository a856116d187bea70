"""`StagedPages`: pages of a prompt that come into host memory before their request enters the engine.

Source: Mooncake, section 3 (steps 3 and 4): pages are received in the DRAM of the decoding node, and are loaded
asynchronously when the request joins a batch.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from concurrent.futures import Future

import numpy as np

from longctx.serving.kv_cache.connector import LeasedSource, PageBlock, PageStore
from longctx.serving.kv_cache.tiers.store import TieredStore

_LOG = logging.getLogger(__name__)
_SILENCE = 30.0  # seconds without a page after which the rest is computed, if the source has no longer `patience`
_TAKEN_BYTES = 64 << 20  # at a time
_POLL, _PUT_SECONDS = 0.005, 10.0  # while the host memory's queue takes pages, and for how long it may


class StagedPages:
    """The pages of one prompt on their way to the host tier of an engine.

    Args:
      store: the tiers. source: of the pages.
      pages: in order; `page` of each is not used.
      call: calls something in the loop that runs `run`.

    Attributes:
      ready: ends when all pages are in host memory that will come. What did not come is computed.
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
        self._wake = asyncio.Event()

    @property
    def num_pages(self) -> int:
        """That are to come."""
        return len(self._pages)

    def release(self) -> None:
        """Stop: the request has ended. Pages that are there stay in the tier; it may be called from any thread."""
        self._is_released = True
        self._source.release()
        self._call(self._wake.set)

    async def run(self) -> None:
        """Receive the pages, in the loop of `call`."""
        fetch = self._source.fetch([each.key for each in self._pages], lambda: self._call(self._wake.set))
        heard, done = time.monotonic(), 0
        try:
            while not self._is_released:
                self._wake.clear()
                if blocks := fetch.take(_TAKEN_BYTES):
                    heard = time.monotonic()
                    # The queue of the tier may read them after the fetch, whose memory they are in, has been closed.
                    self._blocks += [each._replace(data=np.array(each.data)) for each in blocks]
                    if fetch.num_pages > done:
                        await self._keep(done, done := fetch.num_pages)
                elif fetch.is_over or time.monotonic() - heard > max(_SILENCE, getattr(self._source, "patience", 0.0)):
                    return
                else:
                    await self._wait()
        except Exception:
            _LOG.exception("longctx: pages of a prompt could not be brought to host memory")
        finally:
            fetch.close()
            self._source.release()
            self.ready.set_result(None)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._wake.wait()

    async def _keep(self, first: int, stop: int) -> None:
        """Put complete pages into host memory; the queue there takes a part of them at a time."""
        read = _Blocks([each._replace(first=each.first - first) for each in self._blocks])
        pages, until = self._pages[first:stop], time.monotonic() + _PUT_SECONDS
        while any(self._store.tier_of(each.key) is None for each in pages):
            if self._is_released or time.monotonic() > until:
                break
            self._store.put(pages, read)  # those that are there, or on their way, are left out
            await asyncio.sleep(_POLL)
        self._blocks = [each for each in self._blocks if each.first + len(each.data) > stop]


class _Blocks:
    """A `PageRead` of blocks that have come."""

    def __init__(self, blocks: list[PageBlock]) -> None:
        self._blocks = blocks

    def result(self) -> list[PageBlock]:
        return self._blocks
