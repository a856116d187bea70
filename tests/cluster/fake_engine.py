"""A sending engine without devices: pages are arrays of random numbers, complete as the test says."""

import secrets
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from longctx.cluster.transfer.lease import LeaseGone
from longctx.serving.kv_cache.connector import WHOLE, Needed, PageBlock, PageFetch, assemble
from longctx.serving.kv_cache.leases import LeasedPages
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice

LAYOUT = PageLayout(num_layers=5, num_kv_heads=4, head_dim=8, page_size=4, dtype="bfloat16")


def make_keys(num_pages: int, seed: int = 0) -> list[bytes]:
    return [bytes(row) for row in np.random.default_rng(seed).integers(0, 256, (num_pages, 16), np.uint8)]


class Lease(NamedTuple):
    lease_id: str
    keys: list[bytes]
    length: int


class FakeRead:
    def __init__(self, blocks: list[PageBlock], seconds: float, error: Exception | None) -> None:
        self._blocks, self._seconds, self._error = blocks, seconds, error

    def result(self) -> list[PageBlock]:
        time.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return self._blocks


class FakeEngine:
    """An `Exporter`.

    Args:
      parts: what a read comes in, such as one block per stage; together they need not be of all layers and heads.
      seconds: that a read takes.

    Attributes:
      released: ids of leases. num_reads: reads that have begun.
    """

    def __init__(self, layout: PageLayout = LAYOUT, parts: list[PageSlice] | None = None, seconds: float = 0.0) -> None:
        self.layout, self.parts, self.seconds = layout, parts or [layout.whole], seconds
        self.error: Exception | None = None
        self.released: list[str] = []
        self.num_reads = 0
        self._lock = threading.Lock()
        self.leases: dict[str, tuple[Lease, np.ndarray]] = {}
        self._ready: dict[str, int] = {}

    def add(
        self, num_pages: int, seed: int = 0, ready: int | None = None, tail: int = 0, lease_id: str = ""
    ) -> tuple[Lease, np.ndarray]:
        """Add a lease, and return its pages `[pages, layers, 2, page_size, K, H]` too."""
        shape = (num_pages, *self.layout.shape)
        bits = self.layout.bits
        raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * bits.itemsize), np.uint8)
        length = num_pages * self.layout.page_size - (self.layout.page_size - tail if tail else 0)
        keys = make_keys(num_pages, seed)
        lease_id = lease_id or secrets.token_hex(16)
        lease = Lease(lease_id, keys, length)
        with self._lock:
            self.leases[lease.lease_id] = lease, raw.view(bits)
            self._ready[lease.lease_id] = num_pages if ready is None else ready
        return lease, raw.view(bits)

    def complete(self, lease: Lease, num_pages: int) -> None:
        self._ready[lease.lease_id] = num_pages

    def lease(self, lease_id: str) -> LeasedPages:
        with self._lock:
            if lease_id not in self.leases:
                raise LeaseGone(f"there is no lease {lease_id}")
            keys, length = self.leases[lease_id][0][1:]
            ready = self._ready[lease_id]
        return LeasedPages(None, keys, [*range(ready)], min(length, ready * self.layout.page_size), length)

    def read(self, lease_id: str, first: int, stop: int, layers: tuple[int, int]) -> FakeRead:
        assert 0 <= first < stop <= len(self.lease(lease_id).pages), "only complete pages may be read"
        pages = self.leases[lease_id][1]
        self.num_reads += 1
        blocks = []
        for part in self.parts:
            some_layers, some_heads = part.within(self.layout.whole)
            blocks.append(PageBlock(0, part, pages[first:stop, some_layers, :, :, some_heads]))
        return FakeRead(blocks, self.seconds, self.error)

    def release(self, lease_id: str) -> None:
        with self._lock:
            self.released.append(lease_id)
            self.leases.pop(lease_id, None)


class Taker:
    """Empties a fetch as an engine does."""

    def __init__(
        self,
        source: Any,
        keys: list[bytes],
        layout: PageLayout,
        part: PageSlice | None = None,
        needed: Needed = WHOLE,
    ) -> None:
        self._woken = threading.Event()
        self.part = part or layout.whole
        (layer, last_layer), (head, last_head) = self.part
        shape = (len(keys), last_layer - layer, 2, layout.page_size, last_head - head, layout.row_size)
        self.pages = np.zeros(shape, layout.bits)
        self.fetch: PageFetch = source.fetch(keys, self._woken.set, needed)

    def take(self, max_bytes: int = 1 << 40) -> int:
        """Take what has come, and return how many blocks."""
        blocks = self.fetch.take(max_bytes)
        assemble(blocks, self.pages, self.part)
        return len(blocks)

    def wait_for(self, num_pages: int, timeout: float = 20.0) -> None:
        """Take blocks until so many pages are there."""
        end = time.monotonic() + timeout
        while self.fetch.num_pages < num_pages:
            assert time.monotonic() < end, f"{self.fetch.num_pages} of {num_pages} pages came"
            assert not self.fetch.is_over
            self._woken.wait(0.1)
            self._woken.clear()
            self.take()

    def finish(self, timeout: float = 20.0, max_bytes: int = 1 << 40) -> int:
        """Take all that comes, and return how many leading pages are there."""
        end = time.monotonic() + timeout
        while not self.fetch.is_over:
            assert time.monotonic() < end, "the fetch has no end"
            self._woken.wait(0.1)
            self._woken.clear()
            while self.take(max_bytes):
                pass
        num_pages = self.fetch.num_pages
        self.fetch.close()
        return num_pages


def wait_until(condition: Any, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
