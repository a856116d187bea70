"""Sending side of one transfer: waits for pages, reads them, and cuts them into blocks, one after the other."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from longctx.cluster.transfer.lease import Exporter, Lease, LeaseGone
from longctx.cluster.transfer.options import TransferOptions
from longctx.serving.kv_cache.connector import PageBlock, PageRead
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key

_T = TypeVar("_T")
_POLL_SECONDS = 0.003  # between two looks at how many pages are complete
_READS = 2  # in flight: one is copied from the devices while another is sent
_MAX_PAGES = 64  # of a read: the largest that runners compile


class Wanted(NamedTuple):
    """Pages of a lease that a receiver wants: `num_pages` from page `first` on, of some layers and heads."""

    first: int
    num_pages: int
    part: PageSlice


def wait_for_lease(find: Callable[[], _T], seconds: float, is_closed: Callable[[], bool]) -> _T:
    """Wait for the result of `find`, which raises LeaseGone until the request with the lease has come.

    Raises:
      LeaseGone: it has not come within `seconds`.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return find()
        except LeaseGone:
            if is_closed() or time.monotonic() >= until:
                raise
        time.sleep(_POLL_SECONDS)


def find_wanted(lease: Lease, keys: list[Key], part: PageSlice) -> Wanted:
    """Find pages with these keys in a lease.

    Raises:
      ValueError: it has other pages, or there are no such layers or heads.
    """
    if not keys:
        raise ValueError("no page is asked for")
    first = lease.keys.index(keys[0]) if keys[0] in lease.keys else -1
    if first < 0 or lease.keys[first : first + len(keys)] != keys:
        raise ValueError("the lease has pages of other keys: another prompt, tenant, or secret of the KV cache")
    check_part(part, lease.layout)
    return Wanted(first, len(keys), part)


def check_part(part: PageSlice, layout: PageLayout) -> None:
    """Raise ValueError unless the model has these layers and KV heads."""
    for name, (first, stop), size in zip(part._fields, part, layout.whole, strict=True):
        if not 0 <= first < stop <= size[1]:
            raise ValueError(f"{name} must be a range within 0 to {size[1]}, got {first} to {stop}")


def export_pages(
    exporter: Exporter,
    lease: Lease,
    wanted: Wanted,
    options: TransferOptions,
    is_closed: Callable[[], bool],
) -> Iterator[PageBlock]:
    """Yield all pages that are wanted as they become complete; `first` of a block counts from the first one wanted.

    The next pages are being read while the receiver of this iterator handles those before.

    Raises:
      LeaseGone: the lease ended before.
    """
    row_bytes = lease.layout.page_bytes // lease.layout.num_layers
    group = min(_MAX_PAGES, max(1, options.read_bytes // (row_bytes * (wanted.part.layers[1] - wanted.part.layers[0]))))
    reads: deque[tuple[int, PageRead]] = deque()
    next_page = 0  # the first that no read has begun of
    while (reads or next_page < wanted.num_pages) and not is_closed():
        ready = min(wanted.num_pages, exporter.num_ready(lease.lease_id) - wanted.first)
        while len(reads) < _READS and next_page < ready:
            stop = min(next_page + group, ready)
            read = exporter.read(lease.lease_id, wanted.first + next_page, wanted.first + stop, wanted.part.layers)
            reads.append((next_page, read))
            next_page = stop
        if not reads:
            time.sleep(_POLL_SECONDS)
            continue
        first, read = reads.popleft()
        for block in read.result():
            yield from cut(block._replace(first=first + block.first), wanted.part, options.block_bytes)


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
