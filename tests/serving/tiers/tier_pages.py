"""Pages for tests of tiers: small, each with contents that follow from its key."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longctx.serving.kv_cache.connector import PageBlock, PageFetch, PageStore
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore

LAYOUT = PageLayout(num_layers=3, num_kv_heads=4, head_dim=2, page_size=4, dtype="bfloat16")
FINGERPRINT = b"a model"


def chain(name: str, count: int) -> list[bytes]:
    """Keys of a sequence's pages."""
    return [f"{name}-{number}".encode() for number in range(count)]


def contents(key: bytes, layout: PageLayout = LAYOUT) -> np.ndarray:
    """The only right payload of a page, `[layers, 2, page_size, K, H]`."""
    generator = np.random.default_rng(list(key))
    return generator.integers(0, 2**16, layout.shape).astype(layout.bits)


def stores_of(keys: Sequence[bytes], first: int = 0) -> list[PageStore]:
    """Pages of a chain that begins with these keys at page `first`."""
    parents = [b"", *keys]
    return [
        PageStore(key, page, first + page, "", parent)
        for page, (key, parent) in enumerate(zip(keys, parents, strict=False))
    ]


class Read:
    """A `PageRead` that is ready, as blocks of some parts; or one that waits for `gate`, or fails."""

    def __init__(
        self,
        keys: Sequence[bytes],
        parts: Sequence[PageSlice] = (LAYOUT.whole,),
        gate: threading.Event | None = None,
        error: Exception | None = None,
        layout: PageLayout = LAYOUT,
    ) -> None:
        self.pages = np.stack([contents(key, layout) for key in keys])
        self.parts, self.gate, self.error, self.layout = parts, gate, error, layout

    def result(self) -> list[PageBlock]:
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        blocks = []
        for part in self.parts:
            layers, heads = part.within(self.layout.whole)
            blocks.append(PageBlock(0, part, self.pages[:, layers, :, :, heads]))
        return blocks


def make_store(directory: Path | None = None, pages: int = 16, disk_pages: int = 64, **options: Any) -> TieredStore:
    """A store with host memory for so many pages, and a disk if there is a directory."""
    layout = options.pop("layout", LAYOUT)
    fingerprint = options.pop("fingerprint", FINGERPRINT)
    disk_bytes = options.pop("disk_bytes", disk_pages * layout.page_bytes + 2**20) if directory is not None else 0
    options.setdefault("queue_bytes", pages * layout.page_bytes)
    disk, eviction = None if directory is None else str(directory), options.pop("eviction", "lru")
    key_file = options.pop("disk_key_file", None)
    config = TierConfig(pages * layout.page_bytes, disk_bytes, disk, eviction, disk_key_file=key_file)
    return TieredStore(config, layout, fingerprint, **options)


def put(store: TieredStore, keys: Sequence[bytes], first: int = 0, flush: bool = True, **options: Any) -> int:
    """Store pages as an executor does; how many were wanted."""
    wanted = store.wanted(stores_of(keys, first))
    if wanted:
        store.put(wanted, Read([page.key for page in wanted], layout=store.layout, **options))
    if flush:
        assert store.flush(20)
    return len(wanted)


def drain(
    fetch: PageFetch,
    keys: Sequence[bytes],
    woken: threading.Event,
    max_bytes: int = 2**30,
    whole: PageSlice = LAYOUT.whole,
) -> int:
    """Take all blocks of a fetch, as the engine's thread does, and compare them with its keys' only right contents."""
    deadline, taken = time.monotonic() + 30, 0
    layers, heads = whole.within(LAYOUT.whole)
    while not fetch.is_over:
        woken.clear()
        blocks = fetch.take(max_bytes)
        for block in blocks:
            assert block.part == whole
            assert block.first == taken
            for page in block.data:
                expected = contents(keys[taken])[layers, :, :, heads]
                np.testing.assert_array_equal(page, expected)
                taken += 1
        if not blocks and not fetch.is_over:
            woken.wait(0.05)
        assert time.monotonic() < deadline, "the fetch does not end"
    assert fetch.num_pages == taken
    return taken


def load(store: TieredStore, keys: Sequence[bytes], max_bytes: int = 2**30) -> int:
    """Fetch pages, check what comes, and close; how many leading pages came."""
    woken = threading.Event()
    fetch = store.fetch(keys, woken.set)
    count = drain(fetch, keys, woken, max_bytes, store.part)
    fetch.close()
    return count


def only_on_disk(store: TieredStore) -> None:
    """Let host memory lose the pages that the disk has."""
    store.evict(lambda key: True)


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)
