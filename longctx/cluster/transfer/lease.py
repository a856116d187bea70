"""Protocol of engines that lease pages to others, and how the pages of a lease are read block by block.

Source: Mooncake, section 3 (the messenger streams pages to the decoding side while prefill still runs).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from longctx.cluster.transfer.options import TransferOptions
from longctx.serving.kv_cache.connector import WHOLE, Needed, PageBlock, PageRead
from longctx.serving.kv_cache.leases import LeasedPages
from longctx.serving.kv_cache.leases import LeaseGone as LeaseGone
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key

POLL_SECONDS = 0.003  # between two looks at how many pages are complete
_READS = 2  # in flight: one is copied from the devices while another is sent
_MAX_PAGES = 64  # of a read: the largest that runners compile


@runtime_checkable
class Exporter(Protocol):
    """Engine that sends pages. Senders call it from threads of their own; no call may wait for a step.

    `lease` and `read` keep a lease alive: it expires only some time after the last call.

    Source:
      Mooncake, 3 (the messenger: KV cache from host to host, while later layers are computed).

    Examples:
      >>> from concurrent.futures import Future
      >>> import numpy as np
      >>> from longctx.cluster.transfer import Exporter
      >>> from longctx.serving.kv_cache.connector import PageBlock
      >>> from longctx.serving.kv_cache.leases import LeasedPages
      >>> from longctx.serving.kv_cache.page_layout import PageLayout
      >>> layout = PageLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
      >>> keys, pages = [bytes([n] * 16) for n in range(3)], np.ones((3, *layout.shape), np.float32)
      >>> class Shelf:
      ...     def lease(self, lease_id):
      ...         return LeasedPages(None, keys, pages=[0, 1, 2], length=12, total=12)
      ...     def read(self, lease_id, first, stop, layers):
      ...         read = Future()
      ...         read.set_result([PageBlock(0, layout.whole, pages[first:stop])])
      ...         return read
      ...     def release(self, lease_id):
      ...         pass
      >>> shelf: Exporter = Shelf()  # arrays of this process; of an engine, `Engine.pages` is one
      >>> lease_id = "0123"  # of random bits, in practice
      >>> [block] = shelf.read(lease_id, 0, len(shelf.lease(lease_id).pages), (0, 2)).result()
      >>> block.data.shape  # pages, layers, keys and values, page_size, KV heads, head size
      (3, 2, 2, 4, 1, 4)
    """

    def lease(self, lease_id: str) -> LeasedPages:
        """Return a lease: the keys of all its pages, and those of its leading pages that are complete.

        Raises:
          LeaseGone: there is no such lease.
        """
        ...

    def read(self, lease_id: str, first: int, stop: int, layers: tuple[int, int]) -> PageRead:
        """Begin to read complete pages of a lease.

        The result is right even if the lease ends before it has come.

        Args:
          lease_id: of the lease.
          first, stop: index of the first page in the lease, and of the one after the last.
          layers: (first, stop) of the layers to read at least.

        Returns:
          The read, which gives the blocks when they have come.

        Raises:
          LeaseGone: there is no such lease.
        """
        ...

    def release(self, lease_id: str) -> None:
        """End a lease that is not needed any more. One that is gone already is no error."""
        ...


class Wanted(NamedTuple):
    """Pages of a lease that a receiver wants: `num_pages` from page `first` on, of some layers and heads."""

    first: int
    num_pages: int
    part: PageSlice
    needed: Needed = WHOLE


def find_wanted(
    held: list[Key], keys: list[Key], part: PageSlice, layout: PageLayout, needed: Needed = WHOLE
) -> Wanted:
    """Find pages in a lease of pages with the keys `held`.

    Raises:
      ValueError: it has other pages, or there are no such layers or heads.
    """
    if not keys:
        raise ValueError("no page is asked for")
    first = held.index(keys[0]) if keys[0] in held else -1
    if first < 0 or held[first : first + len(keys)] != keys:
        raise ValueError("the lease has pages of other keys: another prompt, tenant, or secret of the KV cache")
    layout.check_part(part)
    stops = [-1, *(at for layers in needed.layers for at in layers)]
    if sorted({*stops}) != stops or stops[-1] > layout.num_layers or not 0 <= needed.pages < len(keys):
        raise ValueError(f"what is needed must be ascending layers of pages before the last one, got {needed}")
    return Wanted(first, len(keys), part, needed)


def export_pages(
    exporter: Exporter,
    lease_id: str,
    layout: PageLayout,
    wanted: Wanted,
    options: TransferOptions,
    is_closed: Callable[[], bool],
) -> Iterator[PageBlock]:
    """Yield all pages that are wanted as they become complete; `first` of a block counts from the first one wanted.

    The next pages are being read while the receiver of this iterator handles those before.

    Raises:
      LeaseGone: the lease ended before.
    """
    row_bytes = layout.page_bytes // layout.num_layers
    group = min(_MAX_PAGES, max(1, options.read_bytes // (row_bytes * (wanted.part.layers[1] - wanted.part.layers[0]))))
    reads: deque[tuple[int, PageRead]] = deque()
    parts, early = wanted.needed.parts(wanted.part), wanted.needed.pages
    next_page = 0 if parts else early  # the first that no read has begun of
    while (reads or next_page < wanted.num_pages) and not is_closed():
        ready = min(wanted.num_pages, len(exporter.lease(lease_id).pages) - wanted.first)
        while len(reads) < _READS and next_page < ready:
            stop, layers = min(next_page + group, ready), wanted.part.layers
            if next_page < early:
                stop, layers = min(stop, early), (parts[0].layers[0], parts[-1].layers[1])
            read = exporter.read(lease_id, wanted.first + next_page, wanted.first + stop, layers)
            reads.append((next_page, read))
            next_page = stop
        if not reads:
            time.sleep(POLL_SECONDS)
            continue
        first, read = reads.popleft()
        for block in read.result():
            for part in parts if first < early else (wanted.part,):
                yield from cut(block._replace(first=first + block.first), part, options.block_bytes)


def cut(block: PageBlock, part: PageSlice, block_bytes: int) -> Iterator[PageBlock]:
    """Cut a block into blocks of at most `block_bytes` (or one layer of a page) of what it has of `part`, in order."""
    common = block.part.intersect(part)
    if common is None:
        return
    layers, heads = common.within(block.part)
    data = block.data[:, layers, :, :, heads]
    num_pages, num_layers = data.shape[:2]
    page_bytes = data.nbytes // num_pages
    pages_each = max(1, block_bytes // page_bytes)
    layers_each = min(num_layers, max(1, block_bytes * num_layers // page_bytes))
    for page in range(0, num_pages, pages_each):
        for layer in range(0, num_layers, layers_each):
            piece = data[page : page + pages_each, layer : layer + layers_each]
            first_layer = common.layers[0] + layer
            piece_part = PageSlice((first_layer, first_layer + piece.shape[1]), common.heads)
            yield PageBlock(block.first + page, piece_part, piece)
