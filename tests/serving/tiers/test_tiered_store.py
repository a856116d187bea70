"""Pages in host memory and on disk: what was put comes back, or nothing does."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_pages import (
    FINGERPRINT,
    LAYOUT,
    Read,
    chain,
    contents,
    drain,
    load,
    make_store,
    put,
    stores_of,
    wait_for,
)

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore

PAGE = LAYOUT.page_bytes
FILE = 8 + PAGE


def flip_in_host_memory(store: TieredStore, key: bytes) -> None:
    fetch = store.fetch([key], lambda: None)
    wait_for(lambda: fetch.num_come == 1)
    fetch.take(PAGE)[0].data.flat[7] ^= 1  # blocks are views of it
    fetch.close()


def test_pages_come_back_from_host_memory() -> None:
    store = make_store()
    keys = chain("a", 5)
    assert put(store, keys[:3]) == 3
    assert put(store, keys) == 2
    assert store.count([*keys, b"other"]) == 5
    assert [store.tier_of(key) for key in (*keys[:1], b"other")] == ["host", None]
    assert load(store, keys) == 5
    assert load(store, [*keys[:2], b"other", *keys[2:]]) == 2
    assert load(store, [b"other"]) == 0
    stats = store.stats.host
    assert (stats.stored, stats.hits, stats.misses, stats.pages, stats.num_bytes) == (5, 7, 5, 5, 5 * PAGE)
    store.close()


def test_slots_that_lie_together_are_one_block() -> None:
    store = make_store()
    keys = chain("a", 8)
    put(store, keys)
    fetch = store.fetch(keys, lambda: None)
    wait_for(lambda: fetch.num_come == 8)
    assert [len(block.data) for block in fetch.take(1)] == [8]  # at least one block comes
    assert fetch.take(100 * PAGE) == []
    assert fetch.num_pages == 8
    fetch.close()
    store.close()


def test_pages_come_back_from_disk_after_a_restart(tmp_path: Path) -> None:
    keys, others = chain("a", 9), chain("b", 4)
    store = make_store(tmp_path)
    put(store, keys)
    put(store, others)
    assert store.stats.disk.stored == 13
    store.close()
    store = make_store(tmp_path)
    assert store.count(keys) == 9
    assert store.tier_of(keys[0]) == "disk"
    assert load(store, keys) == 9
    assert store.tier_of(keys[0]) == "host"
    assert load(store, keys, max_bytes=1) == 9
    assert load(store, others) == 4
    stats = store.stats
    assert (stats.disk.hits, stats.host.hits, stats.disk.corrupt) == (13, 9, 0)
    store.close()


def test_cold_pages_leave_host_memory(tmp_path: Path) -> None:
    keys, others = chain("a", 6), chain("b", 2)
    store = make_store(tmp_path)
    put(store, [*keys])
    put(store, others)
    store.pin(keys[:1], time.monotonic() + 60)
    assert store.evict(lambda key: key.startswith(b"a")) == 5
    assert [store.tier_of(key) for key in (*keys[:2], *others[:1])] == ["host", "disk", "host"]
    assert load(store, keys) == 6
    store.close()
    alone = make_store()
    put(alone, keys)
    assert alone.evict(lambda key: key == keys[3]) == 1
    assert alone.count(keys) == 3
    assert alone.evict(lambda key: False) == 0
    alone.close()


def test_a_load_larger_than_host_memory(tmp_path: Path) -> None:
    keys = chain("a", 20)
    store = make_store(tmp_path, pages=30)
    put(store, keys)
    store.close()
    store = make_store(tmp_path, pages=3)
    assert load(store, keys) == 20
    # Two at a time, which hold all of host memory.
    woken = threading.Event()
    fetches = [store.fetch(keys, woken.set) for _ in range(2)]
    assert [drain(fetch, keys, woken) for fetch in fetches] == [20, 20]
    for fetch in fetches:
        fetch.close()
        fetch.close()
    assert load(store, keys) == 20
    store.close()


def test_pages_that_are_read_stay_until_the_fetch_is_closed() -> None:
    store = make_store(pages=4)
    keys = chain("a", 3)
    put(store, keys)
    woken = threading.Event()
    fetch = store.fetch(keys, woken.set)
    wait_for(lambda: fetch.num_come == 3)
    (block,) = fetch.take(2**30)
    for name in "bcd":
        put(store, chain(name, 3))
    store.evict(lambda key: True)
    put(store, chain("e", 4))
    for page, key in zip(block.data, keys, strict=True):
        np.testing.assert_array_equal(page, contents(key))
    assert store.count(chain("e", 4)) == 1  # there was one slot
    fetch.close()
    assert put(store, chain("e", 4)) == 3
    assert load(store, chain("e", 4)) == 4
    store.close()


def test_a_page_is_not_found_before_it_is_whole() -> None:
    store, gate = make_store(), threading.Event()
    keys = chain("a", 3)
    put(store, keys, flush=False, gate=gate)
    assert store.count(keys) == 0
    assert store.wanted(stores_of(keys)) == []  # they are on their way
    assert load(store, keys) == 0
    assert not store.flush(0.05)
    gate.set()
    assert store.flush(20)
    assert load(store, keys) == 3
    store.close()


def test_a_read_that_fails_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = make_store()
    keys = chain("a", 3)
    put(store, keys, error=RuntimeError("the device is lost"))
    assert store.count(keys) == 0
    assert "device is lost" in caplog.text
    assert (store.stats.host.failed, store.stats.host.dropped) == (1, 3)
    put(store, keys)
    assert load(store, keys) == 3
    store.close()


@pytest.mark.parametrize(
    "parts",
    [
        [PageSlice((0, 2), (0, 4))],
        [PageSlice((0, 3), (0, 2))],
        [PageSlice((0, 2), (0, 4)), PageSlice((2, 3), (0, 3))],
        [],
    ],
)
def test_a_page_that_comes_in_part_is_not_kept(parts: list[PageSlice]) -> None:
    store = make_store()
    put(store, chain("a", 2), parts=parts)
    assert store.count(chain("a", 2)) == 0
    assert store.stats.host.dropped == 2
    store.close()


def test_parts_of_pages_are_put_together() -> None:
    store = make_store()
    parts = [PageSlice((0, 1), (0, 4)), PageSlice((1, 3), (2, 4)), PageSlice((1, 3), (0, 2))]
    put(store, chain("a", 3), parts=parts)
    assert load(store, chain("a", 3)) == 3
    store.close()


def test_a_full_queue_of_arrivals_takes_no_more() -> None:
    store, gate = make_store(queue_bytes=3 * PAGE), threading.Event()
    assert put(store, chain("a", 5), flush=False, gate=gate) == 3
    assert put(store, chain("b", 5), flush=False) == 0
    store.put(stores_of(chain("c", 2)), Read(chain("c", 2)))  # without asking
    assert store.stats.waiting_bytes == 3 * PAGE
    gate.set()
    assert store.flush(20)
    assert store.stats.host.dropped == 2 + 5 + 2
    assert store.count(chain("a", 5)) == 3
    store.close()


def test_wrong_bits_in_host_memory_are_a_miss(tmp_path: Path) -> None:
    store = make_store()
    keys = chain("a", 4)
    put(store, keys)
    flip_in_host_memory(store, keys[2])
    assert load(store, keys) == 2
    assert store.stats.host.corrupt == 1
    assert store.count(keys) == 2
    put(store, keys)
    assert load(store, keys) == 4
    store.close()
    # With a disk, the page comes from there.
    store = make_store(tmp_path)
    put(store, keys)
    flip_in_host_memory(store, keys[2])
    assert load(store, keys) == 4
    assert (store.stats.host.corrupt, store.stats.disk.hits) == (1, 1)
    store.close()


def test_prefetched_pages_are_in_host_memory(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    keys = chain("a", 12)
    put(store, keys)
    store.close()
    store = make_store(tmp_path, pages=16)
    store.prefetch([*keys, b"other"])
    wait_for(lambda: store.tier_of(keys[3]) == "host")
    wait_for(lambda: not store.num_loads)
    assert store.tier_of(keys[4]) == "disk"  # a quarter of host memory at a time
    store.prefetch([b"other"])
    assert load(store, keys) == 12
    assert (store.stats.host.hits, store.stats.disk.hits) == (4, 8)
    store.close()


def test_pinned_pages_stay(tmp_path: Path) -> None:
    store = make_store(tmp_path, pages=8, disk_pages=8, disk_bytes=12 * FILE)
    document = chain("document", 3)
    far = time.monotonic() + 1000
    assert store.pin(document, far) == 0  # it comes later
    put(store, document)
    assert store.pin(document, far) == 3
    for name in "abcdefgh":
        put(store, chain(name, 4))
    assert store.count(document) == 3
    assert store.tier_of(document[2]) == "host"
    assert store.stats.host.pinned_bytes == 3 * PAGE
    assert store.stats.disk.pinned_bytes > 0
    # No more than half of a tier is pinned.
    put(store, chain("more", 4))
    assert store.pin(chain("more", 4), far) >= 1
    assert store.stats.host.pinned_bytes == 4 * PAGE
    store.pin([*document, *chain("more", 4)], 0.0)
    assert (store.stats.host.pinned_bytes, store.stats.disk.pinned_bytes) == (0, 0)
    for name in "ijklmnop":
        put(store, chain(name, 4))
    assert store.count(document) == 0
    # A pin ends by itself.
    put(store, document)
    store.pin(document, time.monotonic() + 0.01)
    time.sleep(0.02)
    assert store.count(document) == 3
    assert store.stats.host.pinned_bytes == 0
    store.close()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "load", "load", "prefetch", "evict", "restart", "pin"]),
            st.sampled_from("abcd"),
            st.integers(1, 7),
        ),
        min_size=4,
        max_size=24,
    ),
    st.sampled_from(["lru", "lfu", "length"]),
    st.integers(1, 9),
)
@settings(max_examples=20, deadline=None)
def test_whatever_happens_pages_are_right(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, str, int]], eviction: str, pages: int
) -> None:
    directory = tmp_path_factory.mktemp("disk")

    def make() -> TieredStore:
        return make_store(directory, pages=pages, disk_bytes=12 * FILE, eviction=eviction)

    store = make()
    for call, name, count in calls:
        keys = chain(name, count)
        if call == "put":
            put(store, keys, flush=count % 2 == 0)
        elif call == "load":
            load(store, keys, max_bytes=count * PAGE)
        elif call == "prefetch":
            store.prefetch(keys)
        elif call == "evict":
            store.evict(lambda key: True)
        elif call == "pin":
            store.pin(keys, 2.0**60)
        else:
            store.close()
            store = make()
    assert store.flush(20)
    wait_for(lambda: not store.num_loads)
    stats = store.stats
    assert stats.host.corrupt == stats.disk.corrupt == 0
    assert stats.disk.num_bytes <= 12 * FILE
    assert stats.disk.num_bytes == sum(path.stat().st_size for path in directory.rglob("*.page"))
    # Nothing is held any more: everything can go.
    store.pin([key for name in "abcd" for key in chain(name, 7)], 0.0)
    store.evict(lambda key: True)
    put(store, chain("full", pages))
    assert store.stats.host.pages == pages
    assert (stats.host.failed, stats.disk.failed) == (0, 0)
    store.close()


def test_what_can_not_be_opened_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for config, named in [
        (TierConfig(383), r"host_bytes must be from 384, a page, to .*, got 383"),
        (TierConfig(2**60), r"host_bytes must be from .* this machine's memory"),
        (TierConfig(8 * PAGE, 1, str(file)), f"disk: pages can't be kept in {file}"),
    ]:
        with pytest.raises(ValueError, match=named):
            TieredStore(config, LAYOUT, FINGERPRINT)
