"""The mover of pages: what it asks of a runner, whatever sources and sinks do."""

import threading
import time
from collections.abc import Sequence as List
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryFetch, MemoryStore, split_by

from longctx.serving.executor.page_mover import PageMover
from longctx.serving.kv_cache.connector import Loaded, PageBlock, PageLoad, PageStore
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.scheduler.batch import Batch

LAYOUT = PageLayout(3, 2, 4, 2, "float32")
NUM_PAGES = 40


class Read:
    def __init__(self, data: np.ndarray) -> None:
        self.data, self.num_bytes = data, data.nbytes

    def result(self) -> list[PageBlock]:
        return [PageBlock(0, LAYOUT.whole, self.data)]


class HostRunner:
    """A runner whose pool is in host memory; it refuses what a device's would."""

    def __init__(self) -> None:
        self.layout, self.transfer = LAYOUT, self
        self.pool = np.zeros((NUM_PAGES, *LAYOUT.shape), np.float32)
        self.num_writes: list[int] = []
        self.gate = threading.Event()  # of `place`
        self.gate.set()

    def read_pages(self, pages: List[int], layers: tuple[int, int]) -> Read:
        return Read(self.pool[list(pages)][:, slice(*layers)])

    def place(self, pages: List[int], block: PageBlock, windows: None) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert self.gate.wait(10)
        if not 0 <= block.first <= block.first + len(block.data) <= len(pages) or block.data.ndim != 6:
            raise ValueError("block must be of pages of its load")
        return pages[block.first : block.first + len(block.data)], block.part, np.array(block.data)

    def write_placed(self, blocks: List[Any]) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.num_writes.append(len(blocks))
        for pages, (layers, heads), data in blocks:
            for page, x in zip(pages, data, strict=True):
                self.pool[page, slice(*layers), :, :, slice(*heads)] = x

    def needed(self, pages: List[int], windows: None) -> np.ndarray:
        return np.ones((len(pages), LAYOUT.num_layers, LAYOUT.num_kv_heads), bool)


class Source:
    """Hands out fetches that a test fills."""

    def __init__(self) -> None:
        self.fetches: dict[bytes, MemoryFetch] = {}

    def fetch(self, keys: List[bytes], wake: Any) -> MemoryFetch:
        self.fetches[keys[0]] = fetch = MemoryFetch(keys, wake)
        return fetch


def make_mover(source: Any = None, sink: Any = None, **options: Any) -> PageMover:
    return PageMover(HostRunner(), sink, {"tiers": source}, **options)  # type: ignore[arg-type]


def payload(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, *LAYOUT.shape)).astype(np.float32)


def load(name: str, pages: list[int], source: str = "tiers") -> PageLoad:
    return PageLoad(name, [f"{name}{i}".encode() for i in range(len(pages))], pages, source)


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.001)


def poll_all(mover: PageMover, count: int = 1) -> list[Loaded]:
    ended: list[Loaded] = []
    until = time.monotonic() + 10
    while len(ended) < count and time.monotonic() < until:
        ended += mover.poll(0.5)
    return ended


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    split=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)),
    short=st.integers(0, 6),
    step_bytes=st.integers(1, 4000),
    placed_bytes=st.integers(1, 4000),
    seed=st.integers(0, 2**20),
)
def test_loads_write_their_pages_and_no_others(
    sizes: list[int], split: tuple[int, int, int], short: int, step_bytes: int, placed_bytes: int, seed: int
) -> None:
    """In blocks of any sizes and order, with little room; the first load's source says that less was right."""
    store, random = MemoryStore(LAYOUT, split_by(LAYOUT, *split)), np.random.default_rng(seed)
    mover = make_mover(store, step_bytes=step_bytes, placed_bytes=placed_bytes)
    order = random.permutation(NUM_PAGES).tolist()
    loads, expected = [], np.zeros((NUM_PAGES, *LAYOUT.shape), np.float32)
    for i, size in enumerate(sizes):
        pages, order = order[:size], order[size:]
        loads.append(load(f"load-{i}-", pages))
        expected[pages] = payload(size, i)
        store.pages |= dict(zip(loads[-1].keys, expected[pages], strict=True))
    give = store.fetch

    def fetch(keys: List[bytes], wake: Any) -> MemoryFetch:
        found = give(keys, wake)
        if keys[0] == loads[0].keys[0]:
            type_of = type("Short", (MemoryFetch,), {"num_pages": property(lambda _: short, lambda *_: None)})
            found.__class__ = type_of
        return found

    store.fetch = fetch  # type: ignore[method-assign]
    mover.submit(Batch(0, loads=loads))
    ended = poll_all(mover, len(sizes))
    mover.close()
    assert {x.name: x.num_pages for x in ended} == {
        x.name: min(len(x.pages), short if i == 0 else 99) for i, x in enumerate(loads)
    }
    assert all(0 <= x.seconds < 10 for x in ended)
    np.testing.assert_array_equal(mover.runner.pool, expected)  # type: ignore[attr-defined]
    assert [x.num_closed for x in store.fetches] == [1] * len(sizes)
    assert mover.stats.loads == len(sizes)
    assert mover.stats.short_loads == (short < sizes[0])
    assert mover.stats.loaded_bytes == expected[expected.any((1, 2, 3, 4, 5))].nbytes
    assert mover.placed_bytes == 0


def test_steps_are_delayed_by_few_bytes() -> None:
    """Between steps a bounded number of bytes is written; where nothing else runs, all that has come."""
    source = Source()
    page = LAYOUT.page_bytes
    mover = make_mover(source, step_bytes=2 * page, placed_bytes=5 * page)
    mover.submit(Batch(0, loads=[load("a", list(range(9)))]))
    wait_for(lambda: source.fetches)
    (fetch,) = source.fetches.values()
    data = payload(9)
    fetch.give(*(PageBlock(i, LAYOUT.whole, data[i : i + 1]) for i in range(9)), num_pages=9, end=True)
    wait_for(lambda: mover.placed_bytes == 5 * page)  # and no more are taken
    assert mover.poll() == []
    assert fetch.num_taken <= 7
    assert mover.runner.num_writes == [2]  # type: ignore[attr-defined]
    (ended,) = poll_all(mover)
    assert ended.num_pages == 9
    assert max(mover.runner.num_writes) > 2  # type: ignore[attr-defined]
    mover.close()


def test_a_dropped_load_writes_nothing_more() -> None:
    source = Source()
    mover = make_mover(source)
    mover.submit(Batch(0, loads=[load("a", [0, 1]), load("b", [2, 3])]))
    wait_for(lambda: len(source.fetches) == 2)
    data = payload(2)
    a, b = source.fetches[b"a0"], source.fetches[b"b0"]
    for fetch in (a, b):
        fetch.give(PageBlock(0, LAYOUT.whole, data[:1]), num_pages=1)
    wait_for(lambda: mover.placed_bytes == 2 * LAYOUT.page_bytes)
    b.give(PageBlock(1, LAYOUT.whole, data[1:]), num_pages=2, end=True)
    mover.submit(Batch(1, dropped=["a"]))
    a.give(PageBlock(1, LAYOUT.whole, data[1:]), num_pages=2, end=True)
    assert [(x.name, x.num_pages) for x in poll_all(mover)] == [("b", 2)]
    wait_for(lambda: a.num_closed == 1)
    assert mover.poll() == []
    pool = mover.runner.pool  # type: ignore[attr-defined]
    assert not pool[:2].any()
    np.testing.assert_array_equal(pool[2:4], data)
    mover.close()


def test_a_load_is_closed_only_when_its_memory_is_not_read_any_more() -> None:
    source = Source()
    mover = make_mover(source)
    mover.runner.gate.clear()  # type: ignore[attr-defined]
    mover.submit(Batch(0, loads=[load("a", [0])]))
    wait_for(lambda: source.fetches)
    (fetch,) = source.fetches.values()
    fetch.give(PageBlock(0, LAYOUT.whole, payload(1)))
    wait_for(lambda: fetch.num_taken)
    mover.submit(Batch(1, dropped=["a"]))
    time.sleep(0.05)
    assert fetch.num_closed == 0
    mover.runner.gate.set()  # type: ignore[attr-defined]
    mover.close()
    assert fetch.num_closed == 1
    assert mover.placed_bytes == 0


@pytest.mark.parametrize("how", ["fetch", "take", "block", "shape", "num_pages", "unknown"])
def test_a_source_that_fails_ends_the_load_short(how: str, caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    mover = make_mover(source)
    if how == "fetch":
        source.fetch = lambda keys, wake: 1 / 0  # type: ignore[method-assign]
    mover.submit(Batch(0, loads=[load("a", [5, 6, 7], "nobody" if how == "unknown" else "tiers")]))
    count = 0
    if how not in ("fetch", "unknown"):
        wait_for(lambda: source.fetches)
        (fetch,) = source.fetches.values()
        data = payload(3)
        fetch.give(PageBlock(0, LAYOUT.whole, data[:1]), num_pages=3)
        wait_for(lambda: fetch.num_taken)
        count = 1
        if how == "take":
            fetch.error = OSError("the link is cut")
        elif how == "block":
            fetch.give(PageBlock(2, LAYOUT.whole, data[:2]))
        elif how == "shape":
            fetch.give(PageBlock(1, LAYOUT.whole, data[0]))
        elif how == "num_pages":
            del fetch.num_pages
            fetch.give(end=True)
            count = 0
        fetch.wake()
    (ended,) = poll_all(mover)
    assert ended[:2] == ("a", count)
    mover.close()
    assert mover.stats.failed_loads == mover.stats.short_loads == 1
    assert not mover.runner.pool[:5].any()  # type: ignore[attr-defined]
    assert "load" in caplog.text


def test_a_load_without_blocks_ends_after_a_while() -> None:
    source, now = Source(), [0.0]
    mover = make_mover(source, deadline=30, clock=lambda: now[0])
    mover.submit(Batch(0, loads=[load("a", [0, 1]), load("b", [2])]))
    wait_for(lambda: len(source.fetches) == 2)
    now[0] = 29.0
    source.fetches[b"a0"].give(PageBlock(0, LAYOUT.whole, payload(1)), num_pages=1)
    wait_for(lambda: mover.placed_bytes)
    assert mover.poll() == []
    now[0] = 31.0
    assert mover.poll() == [Loaded("b", 0, 31.0)]
    now[0] = 60.0
    assert mover.poll(5.0) == [Loaded("a", 1, 60.0)]
    mover.close()
    assert mover.stats.late_loads == 2
    assert all(fetch.num_closed == 1 for fetch in source.fetches.values())


def test_a_load_that_waits_for_room_is_not_late() -> None:
    source, now, read = Source(), [0.0], set()

    def clock() -> float:
        read.add((threading.current_thread().name, now[0]))
        return now[0]

    mover = make_mover(source, placed_bytes=1, deadline=30, clock=clock)
    mover.submit(Batch(0, loads=[load("a", [0]), load("b", [2])]))
    wait_for(lambda: len(source.fetches) == 2)
    source.fetches[b"a0"].give(PageBlock(0, LAYOUT.whole, payload(1)), num_pages=1)
    wait_for(lambda: mover.placed_bytes)
    now[0] = 40.0
    source.fetches[b"b0"].wake()
    wait_for(lambda: ("longctx-pages", 40.0) in read)
    now[0] = 60.0
    assert [x.name for x in mover.poll()] == []
    mover.close()


def test_poll_waits_for_the_end_of_a_load_and_no_longer() -> None:
    source, before = Source(), {*threading.enumerate()}
    mover = make_mover(source)
    assert mover.poll(10) == []  # nothing loads
    mover.submit(Batch(0, loads=[load("a", [0])]))
    assert mover.poll(0.01) == []
    wait_for(lambda: source.fetches)
    (fetch,) = source.fetches.values()
    timer = threading.Timer(0.05, lambda: fetch.give(PageBlock(0, LAYOUT.whole, payload(1)), num_pages=1, end=True))
    timer.start()
    (ended,) = mover.poll(10)
    assert ended.num_pages == 1
    assert ended.seconds < 5
    mover.close()
    mover.close()
    assert "longctx-pages" not in [thread.name for thread in {*threading.enumerate()} - before]


def stores(*pages: int) -> list[PageStore]:
    return [PageStore(bytes([page]), page, i) for i, page in enumerate(pages)]


def test_stored_pages_are_read_before_loads_write() -> None:
    store = MemoryStore(LAYOUT)
    mover = make_mover(store, store)
    mover.runner.pool[:] = data = payload(NUM_PAGES)  # type: ignore[attr-defined]
    mover.submit(Batch(0, stores=stores(3, 1)))
    assert {key[0]: page.tolist() for key, page in store.pages.items()} == {i: data[i].tolist() for i in (3, 1)}
    mover.submit(Batch(1, stores=stores(3, 2)))
    assert mover.stats.stored_pages == 3
    assert mover.stats.stored_bytes == 3 * LAYOUT.page_bytes
    mover.close()


def test_stores_for_which_there_is_no_room_are_dropped() -> None:
    """What the sink has not let go of counts."""

    class Sink(MemoryStore):
        def put(self, stores: List[PageStore], read: Any) -> None:
            self.reads.append(read)

    sink = Sink(LAYOUT)
    mover = make_mover(None, sink, read_bytes=3 * LAYOUT.page_bytes)
    for pages, stored, dropped in (((1, 2), 2, 0), ((3, 4), 3, 1), ((5,), 3, 2)):
        mover.submit(Batch(0, stores=stores(*pages)))
        assert (mover.stats.stored_pages, mover.stats.dropped_stores) == (stored, dropped)
    sink.reads.clear()
    mover.submit(Batch(0, stores=stores(6, 7, 8)))
    assert mover.stats.stored_pages == 6


@pytest.mark.parametrize("method", ["wanted", "put"])
def test_a_sink_that_fails_costs_pages_only(method: str, caplog: pytest.LogCaptureFixture) -> None:
    sink = MemoryStore(LAYOUT)
    setattr(sink, method, lambda *_: 1 / 0)
    mover = make_mover(None, sink)
    mover.submit(Batch(0, stores=stores(1, 2)))
    assert mover.stats.stored_pages == 0
    assert mover.stats.dropped_stores == (2 if method == "put" else 0)
    assert "ZeroDivisionError" in caplog.text
