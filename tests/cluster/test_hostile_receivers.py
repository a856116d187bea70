"""Whatever a receiver of pages does, and whatever fails in one transfer, the sender's others go on."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from cluster.fake_engine import LAYOUT, FakeEngine, Lease, Taker, wait_until
from cluster.ways import OPTIONS

from longctx.cluster.transfer.messages import VERSION, FromReceiver, Grant, Open, encode
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.zmq_receiver import PageReceiver
from longctx.cluster.transfer.zmq_sender import PageSender
from longctx.serving.kv_cache.connector import WHOLE, Needed


class Peer:
    """A receiver that says what a test wants."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 1 << 14)
        self.socket.connect(f"tcp://{address}")

    def send(self, message: FromReceiver) -> None:
        self.socket.send(encode(message))

    def open(self, lease: Lease, block_bytes: int = 1 << 20, lease_timeout: int = 0, needed: Needed = WHOLE) -> None:
        part = LAYOUT.whole
        keys = lease.keys
        self.send(Open(VERSION, lease.lease_id, keys, LAYOUT, b"", *part, block_bytes, lease_timeout, needed))

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def peer_of(engine: FakeEngine, options: TransferOptions = OPTIONS) -> Iterator[tuple[PageSender, Peer]]:
    with PageSender(engine, LAYOUT, options=options) as sender:
        peer = Peer(sender.address)
        try:
            yield sender, peer
        finally:
            peer.close()


def still_serves(sender: PageSender, engine: FakeEngine) -> None:
    """Another receiver gets its pages."""
    lease, _ = engine.add(3, seed=9)
    with PageReceiver(LAYOUT, options=OPTIONS) as receiver:
        assert Taker(receiver.source(sender.address, lease.lease_id), lease.keys, LAYOUT).finish() == 3


@pytest.mark.parametrize(
    "needed",
    [
        Needed(3),
        Needed(-1),
        Needed(1, ((0, 6),)),
        Needed(1, ((2, 3), (0, 1))),
        Needed(1, ((2, 2),)),
        Needed(1, ((-1, 2),)),
    ],
)
def test_what_is_needed_must_be_layers_of_pages_before_the_last(needed: Needed) -> None:
    engine = FakeEngine()
    lease, _ = engine.add(3)
    with peer_of(engine) as (sender, peer):
        peer.open(lease, needed=needed)
        wait_until(lambda: sender.stats.outcomes["refused"] == 1)
        still_serves(sender, engine)


def test_an_error_of_one_transfer_costs_that_transfer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    lease, _ = engine.add(3, ready=0)
    with peer_of(engine) as (sender, peer):
        other = Peer(sender.address)
        peer.open(lease)
        other.open(lease)
        wait_until(lambda: sender.num_streams == 2)
        send, doomed = zmq.Socket.send_multipart, list[Any]()

        def fail(self: zmq.Socket[bytes], frames: list[Any], *arguments: Any, **more: Any) -> Any:
            doomed.append(frames[0])
            if frames[0] == doomed[0]:
                raise zmq.ZMQError(zmq.EFSM)
            return send(self, frames, *arguments, **more)

        monkeypatch.setattr(zmq.Socket, "send_multipart", fail)
        wait_until(lambda: sender.stats.outcomes["failed"] == 1)
        assert sender.num_streams == 1
        still_serves(sender, engine)
        other.close()
    assert "a transfer failed" in caplog.text


def test_credits_without_bounds_do_not_fill_memory() -> None:
    options = dataclasses.replace(OPTIONS, block_bytes=1 << 16, queue_bytes=1 << 20, max_queue_bytes=3 << 19)
    engine = FakeEngine()
    lease, pages = engine.add(6000)
    assert pages.nbytes > 10 << 20
    with peer_of(engine, options) as (sender, peer):
        others = [peer, Peer(sender.address)]
        for each in others:
            each.open(lease)
            each.send(Grant(4000))
        wait_until(lambda: sender.num_queued_bytes > 5 << 18)
        for _ in range(30):
            time.sleep(0.01)
            assert sender.num_queued_bytes <= options.max_queue_bytes
        assert sender.stats.bytes < pages.nbytes
        still_serves(sender, engine)
        for each in others:
            each.close()
        wait_until(lambda: sender.num_streams == 0 and sender.num_queued_bytes == 0)


def test_a_transfer_is_as_fast_as_its_receiver_reads() -> None:
    """Room in the queue comes back: many times its size is sent."""
    options = dataclasses.replace(OPTIONS, queue_bytes=1, max_queue_bytes=1)
    engine = FakeEngine()
    lease, pages = engine.add(40)
    with PageSender(engine, LAYOUT, options=options) as sender, PageReceiver(LAYOUT, options=OPTIONS) as receiver:
        taker = Taker(receiver.source(sender.address, lease.lease_id), lease.keys, LAYOUT)
        assert taker.finish() == 40
        assert (taker.pages == pages).all()
        wait_until(lambda: sender.num_queued_bytes == 0)
