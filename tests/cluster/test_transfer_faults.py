"""Links and processes fail in the midst of a transfer: it ends short, what came is right, and nothing is left."""

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster.fake_engine import LAYOUT, FakeEngine, Taker, make_keys, wait_until
from cluster.link_proxy import LinkProxy
from cluster.ways import OPTIONS, SECRET, Way, mooncake_engine, open_way
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.transfer.mooncake import MooncakePuller
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.zmq_receiver import PageReceiver
from longctx.cluster.transfer.zmq_sender import PageSender

NUM_PAGES = 40
both = pytest.mark.parametrize("way_name", ["zmq", "curve"])


@pytest.fixture(autouse=True)
def no_error(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What others do wrong is no error of ours."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@contextlib.contextmanager
def over_a_link(
    way_name: str, seconds: float = 0.0, options: TransferOptions = OPTIONS
) -> Iterator[tuple[Way, LinkProxy]]:
    engine = FakeEngine(seconds=seconds)
    with open_way(way_name, engine, options=options) as way, LinkProxy(way.sender.address) as link:  # type: ignore[union-attr]
        way.sender.address = link.address  # type: ignore[union-attr]
        yield way, link


def begin(way: Way, **more: Any) -> tuple[Taker, np.ndarray]:
    lease, pages = way.engine.add(NUM_PAGES)
    return Taker(way.source(lease.lease_id, **more), lease.keys, LAYOUT), pages


def check(taker: Taker, pages: np.ndarray) -> int:
    """Finish a fetch, and check that the pages that it counts are right."""
    num_pages = taker.finish()
    assert np.array_equal(taker.pages[:num_pages], pages[:num_pages])
    return num_pages


@both
def test_a_link_that_is_cut(way_name: str) -> None:
    with over_a_link(way_name, seconds=0.05) as (way, link):
        taker, pages = begin(way)
        taker.wait_for(2)
        link.cut()
        assert 2 <= check(taker, pages) < NUM_PAGES
        assert way.received.outcomes["lost"] == 1, "a broken connection is noticed, not waited for"
        wait_until(lambda: way.sender.num_streams == way.receiver.num_fetches == 0)  # type: ignore[union-attr]
        wait_until(lambda: len(way.engine.released) == 1)  # over a new connection
        taker, pages = begin(way)
        assert check(taker, pages) == NUM_PAGES


def test_a_lease_may_come_after_its_fetch() -> None:
    with open_way("zmq") as way:
        taker = Taker(way.source("soon", lease_timeout=20.0), make_keys(3), LAYOUT)
        never = Taker(way.source("never", lease_timeout=0.2), make_keys(3), LAYOUT)
        other = Taker(way.source("other", lease_timeout=20.0), make_keys(3, seed=1), LAYOUT)
        assert never.finish() == 0
        _, pages = way.engine.add(3, lease_id="soon")
        way.engine.add(3, lease_id="other")
        assert check(taker, pages) == 3
        assert other.finish() == 0  # its pages are others
        assert (way.received.outcomes["complete"], way.received.outcomes["ended"]) == (1, 2)
        wait_until(lambda: way.sender.num_streams == 0)  # type: ignore[union-attr]
        assert (way.sent.outcomes["ended"], way.sent.outcomes["refused"]) == (1, 1)


def test_a_link_that_is_slow() -> None:
    with over_a_link("curve") as (way, link):
        link.bytes_per_second = 200e3
        taker, pages = begin(way)
        assert check(taker, pages) == NUM_PAGES


@both
def test_a_link_that_stalls(way_name: str) -> None:
    with over_a_link(way_name, seconds=0.05) as (way, link):
        taker, pages = begin(way)
        taker.wait_for(2)
        link.is_stalled = True
        assert check(taker, pages) < NUM_PAGES
        assert way.received.outcomes["late"] + way.received.outcomes["lost"] == 1
        wait_until(lambda: way.sender.num_streams == 0)  # type: ignore[union-attr]


@both
@settings(max_examples=12)
@given(fraction=st.floats(0, 1))
def test_flipped_bits_never_become_pages(way_name: str, fraction: float) -> None:
    """Wherever the bit is: in ZeroMQ's own bytes, in a header, in a page."""
    options = dataclasses.replace(OPTIONS, silence_timeout=0.4)
    with over_a_link(way_name, options=options) as (way, link):
        lease, pages = way.engine.add(4)
        link.flip_at = int(fraction * pages.nbytes * 1.01)
        taker = Taker(way.source(lease.lease_id), lease.keys, LAYOUT)
        num_pages = check(taker, pages)
        outcomes = way.received.outcomes
        assert sum(outcomes.values()) == 1
        assert (num_pages == 4) == (outcomes["complete"] == 1)


def test_a_flipped_bit_of_a_page_is_counted_as_corrupt() -> None:
    with over_a_link("zmq") as (way, link):
        lease, pages = way.engine.add(4)
        link.flip_at = pages.nbytes // 2
        assert check(Taker(way.source(lease.lease_id), lease.keys, LAYOUT), pages) < 4
        assert way.received.outcomes["corrupt"] == 1
        wait_until(lambda: way.sender.num_streams == 0)  # type: ignore[union-attr]


@contextlib.contextmanager
def sender_process(num_pages: int, seconds: float, secret: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    arguments = [sys.executable, "-m", "cluster.sender_process", str(num_pages), str(seconds), secret]
    roots = [Path(__file__).parents[1], Path(sys.modules["longctx"].__file__ or "").parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots))}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        address, lease_id = process.stdout.readline().split()
        yield process, address, lease_id
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("way_name", ["curve", "mooncake"])
def test_a_sender_that_is_killed_or_stopped(way_name: str, how: str) -> None:
    lease, pages = FakeEngine().add(NUM_PAGES)
    puller = None
    if way_name == "mooncake":
        puller = MooncakePuller(mooncake_engine("receiver"), OPTIONS.block_bytes)
    secret = None if puller else SECRET
    with (
        sender_process(NUM_PAGES, 0.1, secret or "mooncake") as (process, address, lease_id),
        PageReceiver(LAYOUT, secret=secret, options=OPTIONS, puller=puller) as receiver,
    ):
        taker = Taker(receiver.source(address, lease_id), lease.keys, LAYOUT)
        taker.wait_for(3)
        process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        assert 3 <= check(taker, pages) < NUM_PAGES
        assert receiver.stats.outcomes["lost"] + receiver.stats.outcomes["late"] == 1
        wait_until(lambda: receiver.num_fetches == 0)


def test_a_receiver_that_vanishes() -> None:
    """The sender ends its stream, and the lease is left to expire: another receiver may ask for it."""
    with over_a_link("curve", seconds=0.02) as (way, link):
        taker, pages = begin(way, release=False)
        taker.wait_for(1)
        link.is_stalled = True
        wait_until(lambda: way.sender.num_streams == 0)  # type: ignore[union-attr]
        assert way.sent.outcomes["late"] + way.sent.outcomes["lost"] == 1
        assert way.engine.released == []
        check(taker, pages)


def test_no_sender_there() -> None:
    with PageReceiver(LAYOUT, options=OPTIONS) as receiver:
        lease, pages = FakeEngine().add(3)
        taker = Taker(receiver.source("127.0.0.1:1", lease.lease_id), lease.keys, LAYOUT)
        assert check(taker, pages) == 0
        assert receiver.stats.outcomes["late"] == 1


def test_a_sender_that_comes_late() -> None:
    """It may still be starting when the receiver asks."""
    engine = FakeEngine()
    lease, pages = engine.add(3)
    with PageSender(engine, LAYOUT, options=OPTIONS) as first:
        address = first.address
    with PageReceiver(LAYOUT, options=OPTIONS) as receiver:
        taker = Taker(receiver.source(address, lease.lease_id), lease.keys, LAYOUT)
        time.sleep(0.3)
        with PageSender(engine, LAYOUT, port=int(address.rpartition(":")[2]), options=OPTIONS):
            assert check(taker, pages) == 3


def test_a_slice_from_each_of_several_processes() -> None:
    """An engine in two processes, of which each has half of the layers: a page counts when both halves are there."""
    secret = SECRET
    engines = [FakeEngine(parts=[LAYOUT.whole._replace(layers=layers)]) for layers in ((0, 2), (2, 5))]
    lease, pages = engines[0].add(10)
    engines[1].add(10, ready=4, lease_id=lease.lease_id)
    with (
        PageSender(engines[0], LAYOUT, secret=secret, options=OPTIONS) as first,
        PageSender(engines[1], LAYOUT, secret=secret, options=OPTIONS) as second,
        PageReceiver(LAYOUT, secret=secret, options=OPTIONS) as receiver,
    ):
        taker = Taker(receiver.source([first.address, second.address], lease.lease_id), lease.keys, LAYOUT)
        taker.wait_for(4)
        time.sleep(0.1)
        taker.take()
        assert taker.fetch.num_pages == 4
        engines[1].complete(lease, 10)
        assert check(taker, pages) == 10
        wait_until(lambda: engines[0].released == engines[1].released == [lease.lease_id])


def test_half_of_the_processes_is_not_enough() -> None:
    engine = FakeEngine(parts=[LAYOUT.whole._replace(layers=(0, 2))])
    lease, _ = engine.add(10)
    with PageSender(engine, LAYOUT, options=OPTIONS) as sender, PageReceiver(LAYOUT, options=OPTIONS) as receiver:
        taker = Taker(receiver.source(sender.address, lease.lease_id), lease.keys, LAYOUT)
        assert taker.finish() == 0
        assert receiver.stats.outcomes["ended"] == 1


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def transfer_threads(before: Collection[threading.Thread]) -> list[str]:
    """Those that have begun since; servers of other tests may have some."""
    return [each.name for each in threading.enumerate() if "longctx" in each.name and each not in before]


def test_nothing_is_left_of_faulty_transfers() -> None:
    """Threads, sockets, streams, credits, leases."""
    with over_a_link("curve") as (way, _):
        check(*begin(way))  # the first transfer of a process opens what is kept
    gc.collect()
    files, before = open_files(), threading.enumerate()
    with over_a_link("curve", seconds=0.01) as (way, link):
        for number in range(10):
            taker, pages = begin(way)
            taker.wait_for(1)
            if number % 2:
                link.cut()
            else:
                taker.fetch.close()
            check(taker, pages)
        wait_until(lambda: way.sender.num_streams == way.receiver.num_fetches == 0)  # type: ignore[union-attr]
        wait_until(lambda: way.receiver.num_free_blocks == OPTIONS.max_blocks)
        wait_until(lambda: way.engine.leases == {})
        wait_until(lambda: len(transfer_threads(before)) == 1)
    wait_until(lambda: transfer_threads(before) == [])
    gc.collect()
    wait_until(lambda: open_files() <= files)


def test_closing_in_the_midst() -> None:
    before = threading.enumerate()
    with open_way("curve", FakeEngine(seconds=0.05)) as way:
        taker, pages = begin(way)
        taker.wait_for(1)
        way.sender.close()  # type: ignore[union-attr]
        check(taker, pages)
        way.receiver.close()
        after, _ = begin(way)
        assert after.finish() == 0
    wait_until(lambda: transfer_threads(before) == [])
