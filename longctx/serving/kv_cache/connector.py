"""Interfaces by which pages leave the devices and arrive: what the executor asks of tiers and other engines. No JAX.

Stores and loads are planned by the scheduler (`Batch.stores`, `Batch.loads`) and end in wall time. A store that is
dropped costs a later hit; a load that fails or comes short is computed instead. So whatever is behind these protocols
may lose pages at any time, and must never give wrong ones.
"""

import threading
from collections import deque
from collections.abc import Callable
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
      window: its window page; None: no layer has a window.
    """

    key: Key
    page: int
    number: int
    tenant: str = ""
    parent: Key = b""
    window: int | None = None


class PageLoad(NamedTuple):
    """Pages that a sequence waits for.

    Attributes:
      name: of the load; no other one has it.
      keys: of the pages, in order. pages: the pages of the pool that they are written to.
      source: `"tiers"`, or the id of a transfer.
      windows: the window page of each, or `NO_PAGE`, for which nothing is written; None: no layer has a window.
    """

    name: str
    keys: list[Key]
    pages: list[int]
    source: str = TIERS
    windows: list[int] | None = None


class Loaded(NamedTuple):
    """A load has ended: how many leading pages are there, and how many seconds it took."""

    name: str
    num_pages: int
    seconds: float


class Needed(NamedTuple):
    """The layers that are needed of the first `pages` pages of a load, as ranges `(first, stop)`; of others all are.

    Layers with a sliding window need the pages that a later token sees, the last ones.
    """

    pages: int = 0
    layers: tuple[tuple[int, int], ...] = ()

    def parts(self, part: PageSlice) -> list[PageSlice]:
        """Return what is needed of a part of the first pages."""
        common = (part.intersect(PageSlice(each, part.heads)) for each in self.layers)
        return [each for each in common if each is not None]


WHOLE = Needed()
"""All layers of all pages."""


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

    def fetch(self, keys: List[Key], wake: Any, needed: Needed = WHOLE) -> PageFetch:
        """Begin to fetch pages, see `PageSource`; what is not needed of them need not come."""
        ...

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
class PageFinder(Protocol):
    """Finder of the pages that are kept."""

    def look_up(self, keys: List[Key]) -> int:
        """Return how many leading pages it is known to have, without waiting, and begin to fetch slow ones."""
        ...


@runtime_checkable
class PageKeeper(PageFinder, PageSource, Protocol):
    """Keeper of pages beyond the devices of an engine."""

    def wanted(self, stores: List[PageStore]) -> list[PageStore]:
        """Those that are not there yet, and for which there is room in the queue: only these are read."""
        ...

    def put(self, stores: List[PageStore], read: PageRead) -> None:
        """Keep pages once they are read; never waits."""
        ...

    def ask_ahead(self, keys: List[Key]) -> "Future[None] | None":
        """Find out what `look_up` will say; None: nothing is to be waited for."""
        ...

    def pin(self, keys: List[Key], until: float) -> int:
        """Keep pages until a time of `time.monotonic()`, or, if that is over, let them go when their turn comes."""
        ...

    def close(self) -> None:
        """End its threads; it may be called more than once."""
        ...


class MissingParts:
    """Layers and KV heads of some pages that have not come yet.

    Args:
      missing: bool `[pages, layers, KV heads]`.
      part: that these layers and heads are of the model's.
    """

    def __init__(self, missing: np.ndarray, part: PageSlice) -> None:
        self._missing, self._part = missing, part

    @classmethod
    def of(cls, num_pages: int, part: PageSlice, needed: Needed = WHOLE) -> "MissingParts":
        """All that is needed of a part of some pages."""
        layers, heads = (stop - first for first, stop in part)
        missing = np.ones((num_pages, layers, heads), bool)
        missing[: needed.pages] = False
        for each in needed.parts(part):
            missing[: needed.pages, each.within(part)[0]] = True
        return cls(missing, part)

    def add(self, block: PageBlock) -> None:
        """Note that a block has come."""
        if (common := block.part.intersect(self._part)) is not None:
            layers, heads = common.within(self._part)
            self._missing[block.first : block.first + len(block.data), layers, heads] = False

    @property
    def complete(self) -> np.ndarray:
        """Whether all of each page has come, bool `[pages]`."""
        return np.logical_not(np.any(self._missing, axis=(1, 2)))

    @property
    def num_leading(self) -> int:
        """Leading pages of which all has come."""
        return int(np.append(self.complete, False).argmin())


def assemble(blocks: List[PageBlock], outs: List[np.ndarray | None] | np.ndarray, part: PageSlice) -> list[bool]:
    """Copy the pages of blocks into arrays `[layers, 2, page_size, heads, row_size]` of `part`; which are complete.

    `None`: the page is left out.
    """
    missing = MissingParts.of(len(outs), part)
    for block in blocks:
        if (common := block.part.intersect(part)) is None:
            continue
        (layers, heads), (from_layers, from_heads) = common.within(part), common.within(block.part)
        for out, source in zip(outs[block.first :], np.asarray(block.data), strict=False):
            if out is not None:
                out[layers, :, :, heads] = source[from_layers, :, :, from_heads].view(out.dtype)
        missing.add(block)
    return missing.complete.tolist()


class Arrivals:
    """`PageFetch` that threads of a tier or a transfer fill, in any order of blocks.

    Args:
      num_pages: of the load. want: the part of them that is fetched.
      wake: called when blocks have come, and at the end.
      on_taken: called with the tag of each block that the engine has taken, or will not take.
      on_close: called once, when the engine closes the fetch.
      on_outcome: called once, with how it ended.
      needed: of the load.

    Attributes:
      outcome: how it ended; None: it has not. `complete`: all pages came. `dropped`: it was closed before.
      num_come: leading pages of which all has come.
    """

    def __init__(
        self,
        num_pages: int,
        want: PageSlice,
        wake: Callable[[], Any],
        on_taken: Callable[[Any], None],
        on_close: Callable[[], None],
        on_outcome: Callable[[Any], None],
        needed: Needed = WHOLE,
    ) -> None:
        self._wake, self._on_taken, self._on_close, self._on_outcome = wake, on_taken, on_close, on_outcome
        self._lock = threading.Lock()
        self._total, self._missing = num_pages, MissingParts.of(num_pages, want, needed)
        self.num_come = self._num_taken = 0
        self._blocks: deque[tuple[PageBlock, Any, int]] = deque()  # with their tags, and `num_come` after them
        self._is_closed = False
        self.outcome: Any = None

    def put(self, block: PageBlock, tag: Any = None) -> bool:
        """Add a block that was checked; returns False if it has ended before."""
        with self._lock:
            if self._is_closed or self.outcome is not None:
                return False
            self._missing.add(block)
            self.num_come = self._missing.num_leading
            self._blocks.append((block, tag, self.num_come))
            if self.num_come == self._total:
                self._set_outcome("complete")
        self._wake()
        return True

    def end(self, outcome: str) -> None:
        """Note that no more blocks will come. The first call counts."""
        with self._lock:
            if self.outcome is not None:
                return
            self._set_outcome(outcome)
        self._wake()

    def take(self, max_bytes: int) -> list[PageBlock]:
        taken: list[PageBlock] = []
        tags = []
        with self._lock:
            while self._blocks and (not taken or self._blocks[0][0].data.nbytes <= max_bytes):
                block, tag, self._num_taken = self._blocks.popleft()
                max_bytes -= block.data.nbytes
                taken.append(block)
                tags.append(tag)
        for tag in tags:
            self._on_taken(tag)
        return taken

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._is_closed or (self.outcome is not None and not self._blocks)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_pages(self) -> int:
        return self._num_taken

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self.outcome is None:
                self._set_outcome("dropped")
            tags = [tag for _, tag, _ in self._blocks]
            self._blocks.clear()
        for tag in tags:
            self._on_taken(tag)
        self._on_close()

    def _set_outcome(self, outcome: str) -> None:
        self.outcome = outcome
        self._on_outcome(outcome)
