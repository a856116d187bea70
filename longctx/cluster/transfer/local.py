"""`LocalReceiver`: pages from another engine of this process; blocks are handed over as they are, arrays of JAX too.

`jax.device_put` onto the other engine's devices happens where they are written.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

from longctx.cluster.transfer.lease import Exporter, LeaseGone, export_pages, find_wanted
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.stats import TransferStats
from longctx.serving.kv_cache.connector import WHOLE, Arrivals, Needed, PageBlock, PageFetch
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key

_LOG = logging.getLogger(__name__)


class LocalReceiver:
    """Receiver of pages of leases of engines in this process.

    Args:
      layout, fingerprint: of the pages of the engine that fetches.
      part: the layers and KV heads that it wants; None: all.
      options: limits and timeouts; None: the default ones.

    Attributes:
      stats: how transfers ended.

    Raises:
      ValueError: a block of `options` is too small for one layer of a page.

    Source:
      Mooncake, 3 (the messenger: KV cache from host to host, while later layers are computed).

    Examples:
      >>> import threading
      >>> from concurrent.futures import Future
      >>> from types import SimpleNamespace
      >>> import numpy as np
      >>> from longctx.cluster.transfer import LocalReceiver
      >>> from longctx.serving.kv_cache.connector import PageBlock
      >>> from longctx.serving.kv_cache.leases import LeasedPages
      >>> from longctx.serving.kv_cache.page_layout import PageLayout
      >>> layout = PageLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
      >>> keys, pages = [bytes([n] * 16) for n in range(3)], np.ones((3, *layout.shape), np.float32)
      >>> lease = LeasedPages(None, keys, pages=[0, 1, 2], length=12, total=12)
      >>> read = Future()
      >>> read.set_result([PageBlock(0, layout.whole, pages)])
      >>> shelf = SimpleNamespace(lease=lambda lease_id: lease, read=lambda *wanted: read)
      >>> shelf.release = lambda lease_id: None  # an `Exporter` of arrays; of an engine, `Engine.pages` is one
      >>> receiver = LocalReceiver(layout)
      >>> source = receiver.source(shelf, "0123", layout)
      >>> woken = threading.Event()
      >>> fetch = source.fetch(keys, woken.set)
      >>> while not fetch.is_over:
      ...     _ = woken.wait(1.0)
      ...     woken.clear()
      ...     blocks = fetch.take(max_bytes=1 << 20)  # to write to the devices
      >>> fetch.num_pages
      3
      >>> fetch.close()
      >>> receiver.stats.outcomes["complete"], receiver.stats.bytes == pages.nbytes
      (1, True)
    """

    def __init__(
        self,
        layout: PageLayout,
        fingerprint: bytes = b"",
        part: PageSlice | None = None,
        options: TransferOptions | None = None,
    ) -> None:
        self.layout, self.fingerprint, self.part = layout, fingerprint, part or layout.whole
        self.options = options or TransferOptions()
        self.options.check_fits(layout)
        self.stats = TransferStats()

    def source(
        self, exporter: Exporter, lease_id: str, layout: PageLayout, fingerprint: bytes = b"", release: bool = True
    ) -> "LocalSource":
        """Make the source of the pages of one lease.

        Args:
          exporter: the engine that has them.
          lease_id: of the lease.
          layout, fingerprint: of the pages of that engine; others are refused.
          release: whether the end of a fetch releases the lease.

        Returns:
          A `LeasedSource`.
        """
        return LocalSource(self, exporter, lease_id, layout, fingerprint, release)


@dataclass(frozen=True, eq=False)
class LocalSource:
    """`LeasedSource` of the pages of a lease in this process. Closing a fetch releases the lease if `releases`."""

    receiver: LocalReceiver
    exporter: Exporter
    lease_id: str
    layout: PageLayout
    fingerprint: bytes
    releases: bool

    def fetch(self, keys: List[Key], wake: Any, needed: Needed = WHOLE) -> PageFetch:
        receiver, deadline = self.receiver, time.monotonic() + self.receiver.options.deadline
        window = threading.Semaphore(receiver.options.window_blocks)

        def on_close() -> None:
            window.release()
            if self.releases:
                self.release()

        arrivals = Arrivals(
            len(keys), receiver.part, wake, lambda tag: window.release(), on_close, receiver.stats.add_outcome, needed
        )

        def is_closed() -> bool:
            return arrivals.is_closed or time.monotonic() > deadline

        def run() -> None:
            try:
                for block in self._blocks(list(keys), needed, is_closed):
                    if not window.acquire(timeout=max(0.0, deadline - time.monotonic())):
                        break
                    receiver.stats.add_block(block.data.nbytes)
                    if not arrivals.put(block, None):
                        break
                arrivals.end("late" if time.monotonic() > deadline else "ended")
            except (LeaseGone, ValueError) as error:
                _LOG.warning("longctx: a transfer ended: %s", error)
                arrivals.end("ended" if arrivals.num_come else "refused")
            except Exception:
                _LOG.exception("longctx: a transfer failed")
                arrivals.end("failed")

        threading.Thread(target=run, name="longctx local transfer", daemon=True).start()
        return arrivals

    def release(self) -> None:
        """Release the lease: it will not be fetched."""
        self.exporter.release(self.lease_id)

    def _blocks(self, keys: list[Key], needed: Needed, is_closed: Callable[[], bool]) -> Iterator[PageBlock]:
        """Yield the pages. Raises LeaseGone, or ValueError: the engines or keys don't fit together."""
        receiver = self.receiver
        receiver.layout.check_same(self.layout, f"lease {self.lease_id}")
        if self.fingerprint != receiver.fingerprint:
            raise ValueError("the pages are of another model or of other weights")
        wanted = find_wanted(self.exporter.lease(self.lease_id).keys, keys, receiver.part, self.layout, needed)
        yield from export_pages(self.exporter, self.lease_id, self.layout, wanted, receiver.options, is_closed)
