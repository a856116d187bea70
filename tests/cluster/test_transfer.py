"""Transfers of pages, in every way: what comes is what was sent, as much as was asked for, and in order."""

import re
import time
from typing import Any

import numpy as np
import pytest
from cluster.fake_engine import LAYOUT, FakeEngine, Taker, make_keys, wait_until
from cluster.ways import NAMES, OPTIONS, open_way
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.transfer.options import TransferOptions
from longctx.serving.kv_cache.connector import Needed
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice

pytestmark = pytest.mark.parametrize("way_name", NAMES)


def test_all_pages_arrive_as_they_were(way_name: str) -> None:
    with open_way(way_name) as way:
        lease, pages = way.engine.add(37, tail=3)
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT)
        assert taker.finish() == 37
        assert np.array_equal(taker.pages, pages)
        wait_until(lambda: way.engine.released == [lease.lease_id])
        assert way.received.outcomes["complete"] == 1
        assert way.received.bytes == pages.nbytes


def test_pages_arrive_while_later_ones_are_computed(way_name: str) -> None:
    with open_way(way_name) as way:
        lease, pages = way.engine.add(9, ready=0)
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT)
        for ready in (1, 2, 5, 8):
            way.engine.complete(lease, ready)
            taker.wait_for(ready)
            assert np.array_equal(taker.pages[:ready], pages[:ready])
            time.sleep(0.05)
            assert taker.take() == 0
        way.engine.complete(lease, 9)
        assert taker.finish() == 9
        assert np.array_equal(taker.pages, pages)


def test_some_pages_of_a_lease(way_name: str) -> None:
    """The receiving engine has those before, and does not want those after."""
    with open_way(way_name) as way:
        lease, pages = way.engine.add(12)
        taker = Taker(way.source(lease.lease_id), lease.keys[5:11], LAYOUT)
        assert taker.finish() == 6
        assert np.array_equal(taker.pages, pages[5:11])
        assert way.sent.bytes == pages[5:11].nbytes


def ranges(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(lambda r: (min(r), max(r[0] + 1, r[1])))


PARTS = st.builds(PageSlice, ranges(LAYOUT.num_layers), ranges(LAYOUT.num_kv_heads))


def split(layers: list[int], heads: list[int]) -> list[PageSlice]:
    """All layers and heads, cut at some numbers of them: what processes or stages of a mesh have."""
    return [
        PageSlice(layers_of, heads_of)
        for layers_of in zip([0, *layers], [*layers, LAYOUT.num_layers], strict=True)
        for heads_of in zip([0, *heads], [*heads, LAYOUT.num_kv_heads], strict=True)
    ]


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, size - 1), unique=True, max_size=3).map(sorted)


@settings(max_examples=8)
@given(
    have=st.builds(split, cuts(LAYOUT.num_layers), cuts(LAYOUT.num_kv_heads)),
    want=PARTS,
    num_pages=st.integers(1, 20),
    block_bytes=st.integers(LAYOUT.page_bytes // LAYOUT.num_layers, 1 << 14),
    read_bytes=st.integers(1, 1 << 15),
    early=st.integers(0, 19),
    layers_of_early=st.sampled_from([(), ((0, 5),), ((0, 1), (3, 4)), ((2, 5),), ((4, 5),)]),
)
def test_any_slices_of_any_mesh(
    way_name: str,
    have: list[PageSlice],
    want: PageSlice,
    num_pages: int,
    block_bytes: int,
    read_bytes: int,
    early: int,
    layers_of_early: tuple[tuple[int, int], ...],
) -> None:
    """Resharding is intersecting: the receiver gets its layers and heads, wherever the sender has them.

    Of the first pages it gets the layers that are needed, as those without a window are.
    """
    needed = Needed(min(early, num_pages - 1), layers_of_early)
    options = TransferOptions(block_bytes, read_bytes, window_blocks=2, max_blocks=5)
    with open_way(way_name, FakeEngine(parts=have), part=want, options=options) as way:
        lease, pages = way.engine.add(num_pages)
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT, want, needed)
        assert taker.finish(max_bytes=block_bytes) == num_pages
        layers, heads = want.within(LAYOUT.whole)
        is_needed = np.zeros((num_pages, LAYOUT.num_layers), bool)
        is_needed[needed.pages :] = True
        for first, stop in needed.layers:
            is_needed[:, first:stop] = True
        is_needed = is_needed[:, layers]
        expected = np.where(is_needed[:, :, None, None, None, None], pages[:, layers, :, :, heads], 0)
        assert np.array_equal(taker.pages, expected)
        row_bytes = LAYOUT.part_bytes(want) // (want.layers[1] - want.layers[0])
        assert way.sent.bytes == is_needed.sum() * row_bytes, "only what was asked for is sent"


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_other_dtypes(way_name: str, dtype: str) -> None:
    layout = LAYOUT._replace(dtype=dtype)
    with open_way(way_name, FakeEngine(layout), layout) as way:
        lease, pages = way.engine.add(3)
        taker = Taker(way.source(lease.lease_id), lease.keys, layout)
        assert taker.finish() == 3
        assert taker.pages.tobytes() == pages.tobytes()


def test_a_receiver_that_does_not_take_is_not_flooded(way_name: str) -> None:
    """What is sent ahead is what was granted, and reads are not far ahead of it."""
    with open_way(way_name) as way:
        lease, pages = way.engine.add(100)
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT)
        wait_until(lambda: way.received.blocks >= OPTIONS.window_blocks)
        time.sleep(0.2)
        assert way.received.blocks == OPTIONS.window_blocks
        assert way.engine.num_reads <= 4
        assert taker.finish() == 100
        assert np.array_equal(taker.pages, pages)


def test_many_transfers_at_a_time(way_name: str) -> None:
    with open_way(way_name) as way:
        leases = [way.engine.add(10 + i, seed=i) for i in range(12)]
        takers = [Taker(way.source(lease.lease_id), lease.keys, LAYOUT) for lease, _ in leases]
        for taker, (lease, pages) in zip(takers, leases, strict=True):
            assert taker.finish() == len(lease.keys)
            assert np.array_equal(taker.pages, pages)
        wait_until(lambda: len(way.engine.released) == 12)
        assert way.received.outcomes["complete"] == 12


def test_a_closed_transfer_stops_and_releases_the_lease(way_name: str) -> None:
    with open_way(way_name) as way:
        lease, _ = way.engine.add(100)
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT)
        wait_until(lambda: way.received.blocks > 0)
        taker.fetch.close()
        taker.fetch.close()
        assert taker.fetch.is_over
        assert taker.take() == 0
        wait_until(lambda: way.engine.released != [])
        assert way.received.outcomes["dropped"] == 1
        assert way.received.blocks < 100 * LAYOUT.page_bytes // OPTIONS.block_bytes
        if way.sender is not None:
            wait_until(lambda: way.sender.num_streams == way.receiver.num_fetches == 0)


def test_a_lease_that_is_kept(way_name: str) -> None:
    with open_way(way_name) as way:
        lease, pages = way.engine.add(4)
        source = way.source(lease.lease_id, release=False)
        for _ in range(2):
            taker = Taker(source, lease.keys, LAYOUT)
            assert taker.finish() == 4
            assert np.array_equal(taker.pages, pages)
        time.sleep(0.05)
        assert way.engine.released == []
        source.release()
        wait_until(lambda: way.engine.released == [lease.lease_id])


def ends(way: Any, taker: Taker, outcome: str, at_most: int) -> None:
    num_pages = taker.finish()
    assert num_pages <= at_most
    assert way.received.outcomes[outcome] == 1
    assert sum(way.received.outcomes.values()) == 1


def test_a_lease_that_ends_in_between(way_name: str) -> None:
    """Pages that came are right; the rest is computed."""
    with open_way(way_name) as way:
        lease, pages = way.engine.add(10, ready=6)
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT)
        taker.wait_for(6)
        way.engine.release(lease.lease_id)
        ends(way, taker, "ended", 6)
        assert np.array_equal(taker.pages[:6], pages[:6])


def test_an_unknown_lease_is_refused(way_name: str) -> None:
    with open_way(way_name) as way:
        ends(way, Taker(way.source("no such lease"), make_keys(3), LAYOUT), "refused", 0)


def test_pages_of_another_prompt_are_refused(way_name: str) -> None:
    with open_way(way_name) as way:
        lease, _ = way.engine.add(5)
        for number, keys in enumerate(
            [make_keys(5, 1), lease.keys[::-1], [*lease.keys, b"x" * 16], lease.keys[:2] * 2]
        ):
            taker = Taker(way.source(lease.lease_id, release=False), keys, LAYOUT)
            assert taker.finish() == 0
            assert way.received.outcomes["refused"] == number + 1


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT._replace(page_size=8),
        LAYOUT._replace(dtype="float8_e4m3fn"),
        LAYOUT._replace(num_kv_heads=8, head_dim=4),
    ],
    ids=["page_size", "float8", "same bytes"],
)
def test_another_layout_is_refused(way_name: str, layout: PageLayout, caplog: pytest.LogCaptureFixture) -> None:
    with open_way(way_name, layout=layout) as way:
        lease, _ = way.engine.add(5)
        ends(way, Taker(way.source(lease.lease_id), lease.keys, layout), "refused", 0)
        assert "another layout" in caplog.text
        if layout.dtype != LAYOUT.dtype:
            assert {layout.dtype, LAYOUT.dtype} <= set(re.split(r"[ ,\n]", caplog.text)), "both are named"
        assert way.sent.blocks == 0


def test_a_read_that_fails_ends_the_transfer(way_name: str, caplog: pytest.LogCaptureFixture) -> None:
    with open_way(way_name) as way:
        lease, _ = way.engine.add(5)
        way.engine.error = RuntimeError("the device is gone")
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT)
        assert taker.finish() == 0
        assert way.sent.outcomes["failed"] == 1
        assert "the device is gone" in caplog.text


def test_a_deadline_ends_the_transfer(way_name: str) -> None:
    options = TransferOptions(silence_timeout=5.0, deadline=0.3)
    with open_way(way_name, options=options) as way:
        lease, pages = way.engine.add(10, ready=4)
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT)
        ends(way, taker, "late", 4)
        assert np.array_equal(taker.pages[: taker.fetch.num_pages], pages[: taker.fetch.num_pages])
        if way.sender is not None:
            wait_until(lambda: way.sender.num_streams == 0)
