"""Interfaces by which pages leave the devices and arrive: what the executor asks of tiers and other engines. No JAX.

Stores and loads are planned by the scheduler (`Batch.stores`, `Batch.loads`) and end in wall time. A store that is
dropped costs a later hit; a load that fails or comes short is computed instead. So whatever is behind these protocols
may lose pages at any time, and must never give wrong ones.
"""

from collections.abc import Sequence as List
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key

LOOKUP_TIMEOUT = 0.005
"""Seconds that a request waits, before it enters an engine, for what slow stores say (`PageKeeper.ask_ahead`)."""

TIERS = "tiers"
"""The source of loads from the engine's own tiers."""


class PageStore(NamedTuple):
    """A full page of the device pool that is complete, and may be kept elsewhere.

    Attributes:
      key: of the page. page: its number in the pool.
      number: which page of its sequence it is. tenant: whose it is.
      parent: the key of the page before it; empty: there is none, or it is not told. Tiers evict chains from their
        tails, for which they need it.
    """

    key: Key
    page: int
    number: int
    tenant: str = ""
    parent: Key = b""


class PageLoad(NamedTuple):
    """Pages that a sequence waits for.

    Attributes:
      name: of the load; no other one has it.
      keys: of the pages, in order. pages: the pages of the pool that they are written to.
      source: `"tiers"`, or the id of a transfer.
    """

    name: str
    keys: list[Key]
    pages: list[int]
    source: str = TIERS


class Loaded(NamedTuple):
    """A load has ended: how many leading pages are there, and how many seconds it took."""

    name: str
    num_pages: int
    seconds: float


class PageBlock(NamedTuple):
    """Keys and values of consecutive pages of a load.

    Attributes:
      first: number of the first of them within the load.
      part: the layers and KV heads that they are of.
      data: `[pages, layers, 2, page_size, heads, row_size]` in the layout's `bits`; a numpy array, or one of JAX's,
        which is on some devices already.
    """

    first: int
    part: PageSlice
    data: Any

    def common_with(self, whole: PageSlice) -> tuple[PageSlice, tuple[slice, slice], tuple[slice, slice]] | None:
        """Return its part of `whole`, and that part's layers and heads in arrays of `whole` and in its own data."""
        common = self.part.intersect(whole)
        return None if common is None else (common, common.within(whole), common.within(self.part))


@runtime_checkable
class PageFetch(Protocol):
    """Pages on their way. Threads of its own fill it; the engine's thread empties it."""

    def take(self, max_bytes: int) -> list[PageBlock]:
        """Blocks that have come, at least one if there is one, without waiting. They stay valid until `close`."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no block will come any more, and all have been taken."""
        ...

    @property
    def num_pages(self) -> int:
        """Leading pages of which every layer and head has been taken and was right."""
        ...

    def close(self) -> None:
        """Drop the rest. It may be called more than once, and waits for no other thread."""
        ...


@runtime_checkable
class PageSource(Protocol):
    """Source of a load's pages."""

    def fetch(self, keys: List[Key], wake: Any) -> PageFetch:
        """Begin to fetch pages; `wake()` is called, in any thread, when blocks have come and at the end."""
        ...


@runtime_checkable
class LeasedSource(PageSource, Protocol):
    """Pages that another engine keeps until they have been fetched or released."""

    def release(self) -> None:
        """Release the pages: no engine will fetch them any more. It may be called more than once, from any thread."""
        ...


@runtime_checkable
class LocatedSources(Protocol):
    """Sources of the loads of a process that follows another one, which says where each process's part comes from."""

    def open(self, lease_id: str) -> PageSource:
        """The pages of a lease, wherever they will be."""
        ...

    def locate(self, lease_id: str, place: dict[str, Any] | None) -> None:
        """They are there, in words of the first process's transfers; None: nowhere else."""
        ...

    def drop(self, lease_id: str) -> None:
        """Drop the pages."""
        ...


@runtime_checkable
class PageRead(Protocol):
    """Pages that are being copied from the devices to the host."""

    def result(self) -> list[PageBlock]:
        """Wait for them. `first` counts from the first page that was asked for; together they are of all layers."""
        ...


@runtime_checkable
class PageSink(Protocol):
    """Sink that keeps pages which leave the devices."""

    def wanted(self, stores: List[PageStore]) -> list[PageStore]:
        """Those that are not there yet, and for which there is room in the queue: only these are read."""
        ...

    def put(self, stores: List[PageStore], read: PageRead) -> None:
        """Keep pages once they are read; never waits."""
        ...


@runtime_checkable
class PageFinder(Protocol):
    """Finder of the pages that are kept."""

    def look_up(self, keys: List[Key]) -> int:
        """Return how many leading pages it is known to have, without waiting, and begin to fetch slow ones."""
        ...


@runtime_checkable
class PageKeeper(PageFinder, PageSink, PageSource, Protocol):
    """Keeper of pages beyond the devices of an engine."""

    def ask_ahead(self, keys: List[Key]) -> "Future[None] | None":
        """Find out what `look_up` will say; None: nothing is to be waited for."""
        ...

    def pin(self, keys: List[Key], until: float) -> int:
        """Keep pages until a time of `time.monotonic()`, or, if that is over, let them go when their turn comes."""
        ...

    def forget(self, key: Key) -> None:
        """Find a page no more, not even after a restart."""
        ...

    def flush(self, timeout: float) -> bool:
        """Wait until all that was put is kept; False if that took longer than `timeout` seconds."""
        ...

    def close(self) -> None:
        """End its threads; it may be called more than once."""
        ...


def assemble(blocks: list[PageBlock], out: np.ndarray, whole: PageSlice) -> None:
    """Copy blocks into an array `[pages, layers, 2, page_size, heads, row_size]` of the layers and heads of `whole`."""
    for block in blocks:
        found = block.common_with(whole)
        if found is None:
            continue
        _, (layers, heads), (from_layers, from_heads) = found
        pages = slice(block.first, block.first + len(block.data))
        out[pages, layers, :, :, heads] = np.asarray(block.data)[:, from_layers, :, :, from_heads]
