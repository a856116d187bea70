"""Leases: pages that an engine holds for another one, the Protocol of that engine, and how their pages are read.

Source: Mooncake, section 3 (the messenger streams pages to the decoding side while prefill still runs).
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from longctx.cluster.transfer.options import TransferOptions
from longctx.serving.kv_cache.connector import PageBlock, PageRead
from longctx.serving.kv_cache.leases import LeaseGone as LeaseGone
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key

_T = TypeVar("_T")
_POLL_SECONDS = 0.003  # between two looks at how many pages are complete
_READS = 2  # in flight: one is copied from the devices while another is sent
_MAX_PAGES = 64  # of a read: the largest that runners compile


class Lease(NamedTuple):
    """Pages of one sequence that outlive its request, until another engine has them or the lease expires.

    Attributes:
      lease_id: of `make_lease_id`.
      keys: one per page, in order; the last may be that of a partial page.
      pages: their numbers in the pool of the engine that holds them. They mean nothing elsewhere.
      tail: tokens in the last page if it is partial, else 0.
      length: tokens in all.
      layout: of the pages.

    Source:
      Mooncake, 3 (pages of a prompt are kept until the decoding instance has them).

    Examples:
      >>> from longctx.cluster.transfer import Lease, make_lease_id
      >>> from longctx.serving.kv_cache.page_layout import PageLayout
      >>> layout = PageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16")
      >>> keys = [bytes([n] * 16) for n in range(2)]
      >>> lease = Lease(make_lease_id(), keys, pages=[5, 9], tail=36, length=100, layout=layout)
      >>> lease.check()
      >>> len(lease.keys) * layout.page_bytes  # bytes to move for 100 tokens
      16777216
      >>> lease._replace(length=300).check()
      Traceback (most recent call last):
          ...
      ValueError: a lease of 300 tokens must have 5 keys and pages and a tail of 44, got 2, 2 and 36
    """

    lease_id: str
    keys: list[Key]
    pages: list[int]
    tail: int
    length: int
    layout: PageLayout

    def check(self) -> None:
        """Check that the numbers of keys, pages and tokens fit together.

        Raises:
          ValueError: they don't.
        """
        num_pages = -(-self.length // self.layout.page_size)
        if not len(self.keys) == len(self.pages) == num_pages or self.tail != self.length % self.layout.page_size:
            raise ValueError(
                f"a lease of {self.length} tokens must have {num_pages} keys and pages and a tail of "
                f"{self.length % self.layout.page_size}, got {len(self.keys)}, {len(self.pages)} and {self.tail}"
            )


def make_lease_id() -> str:
    """Make a new id, which can not be guessed.

    Returns:
      32 hexadecimal digits: 128 random bits.

    Examples:
      >>> from longctx.cluster.transfer import make_lease_id
      >>> len(make_lease_id()), make_lease_id() == make_lease_id()
      (32, False)
    """
    return secrets.token_hex(16)


@runtime_checkable
class Exporter(Protocol):
    """Engine that sends pages. Senders call it from threads of their own; no call may wait for a step.

    `num_ready` and `read` keep a lease alive: it expires only some time after the last call.

    Source:
      Mooncake, 3 (the messenger: KV cache from host to host, while later layers are computed).

    Examples:
      >>> import threading
      >>> from concurrent.futures import Future
      >>> import numpy as np
      >>> from longctx.cluster.transfer import Exporter, Lease, make_lease_id
      >>> from longctx.serving.kv_cache.connector import PageBlock
      >>> from longctx.serving.kv_cache.page_layout import PageLayout
      >>> layout = PageLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
      >>> keys, pages = [bytes([n] * 16) for n in range(3)], np.ones((3, *layout.shape), np.float32)
      >>> lease = Lease(make_lease_id(), keys, [0, 1, 2], 0, 12, layout)
      >>> class Shelf:
      ...     def open(self, lease_id):
      ...         return lease
      ...     def num_ready(self, lease_id):
      ...         return len(pages)
      ...     def read(self, lease_id, first, stop, layers):
      ...         read = Future()
      ...         read.set_result([PageBlock(0, layout.whole, pages[first:stop])])
      ...         return read
      ...     def release(self, lease_id):
      ...         pass
      >>> shelf: Exporter = Shelf()  # arrays of this process; an engine has `longctx.cluster.engine_messenger`
      >>> [block] = shelf.read(lease.lease_id, 0, shelf.num_ready(lease.lease_id), (0, 2)).result()
      >>> block.data.shape  # pages, layers, keys and values, page_size, KV heads, head size
      (3, 2, 2, 4, 1, 4)
    """

    def open(self, lease_id: str) -> Lease:
        """Return the lease with this id.

        Raises:
          LeaseGone: there is none.
        """
        ...

    def num_ready(self, lease_id: str) -> int:
        """Return the number of leading pages that are complete; fewer than all while prefill runs.

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
    lease.layout.check_part(part)
    return Wanted(first, len(keys), part)


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
