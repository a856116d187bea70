"""Hostile senders: no wrong page is taken, and neither the receiver's memory nor other transfers suffer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from cluster.fake_engine import LAYOUT, FakeEngine, Taker, make_keys, wait_until
from cluster.ways import OPTIONS

from longctx.cluster.transfer.messages import (
    TO_SENDER,
    Alive,
    Block,
    Close,
    End,
    Grant,
    Open,
    Place,
    decode,
    digest_of,
    encode,
)
from longctx.cluster.transfer.zmq_receiver import PageReceiver
from longctx.cluster.transfer.zmq_sender import PageSender

PAGE = np.arange(LAYOUT.page_bytes // LAYOUT.bits.itemsize, dtype=LAYOUT.bits).tobytes()
HALF = PAGE[: len(PAGE) // LAYOUT.num_layers * 2]
Frames = list[bytes]


def block(**changes: Any) -> Callable[[], Frames]:
    """The first two layers of page 0, with changes."""
    data: bytes = changes.pop("data", HALF)
    frames: int = changes.pop("frames", 1)

    def make() -> Frames:
        right = Block(0, 0, 1, (0, 2), LAYOUT.whole.heads, digest_of(HALF))
        return [encode(msgspec.structs.replace(right, **changes)), *[data] * frames]

    return make


def say(kind: type[Any], *fields: Any) -> Callable[[], Frames]:
    return lambda: [encode(kind(*fields))]


class FakeSender:
    """A sender that opens a transfer, and then says what a test wants."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.address = f"127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def answer(self, frames: Callable[[], Frames], copies: int = 1) -> None:
        """Open the next transfer, wait until blocks are granted, and send some frames, unless it is refused before."""
        while True:
            assert self.socket.poll(5000), "nothing is asked for"
            peer, header = self.socket.recv_multipart()
            message = decode(header, TO_SENDER)
            if isinstance(message, Open):
                self.socket.send_multipart([peer, encode(Alive())])
            elif isinstance(message, Close):
                return
            elif isinstance(message, Grant) and message.blocks:
                break
        for _ in range(copies):
            self.socket.send_multipart([peer, *frames()])

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def transfer() -> Iterator[tuple[FakeSender, PageReceiver, Taker]]:
    sender = FakeSender()
    try:
        with PageReceiver(LAYOUT, options=OPTIONS) as receiver:
            taker = Taker(receiver.source(sender.address, "lease"), make_keys(3), LAYOUT)
            yield sender, receiver, taker
            wait_until(lambda: receiver.num_fetches == 0)
            wait_until(lambda: receiver.num_free_blocks == OPTIONS.max_blocks)
            engine = FakeEngine()
            lease, _ = engine.add(3)
            with PageSender(engine, LAYOUT, options=OPTIONS) as other:
                assert Taker(receiver.source(other.address, lease.lease_id), lease.keys, LAYOUT).finish() == 3
    finally:
        sender.close()


@pytest.mark.parametrize(
    ("frames", "outcome"),
    [
        (block(frames=0), "malformed"),
        (block(frames=2), "malformed"),
        (block(pages=0), "malformed"),
        (block(first=3), "malformed"),
        (block(first=2, pages=2), "malformed"),
        (block(layers=(4, 6)), "malformed"),
        (block(layers=(2, 2)), "malformed"),
        (block(heads=(0, 1)), "malformed"),  # its bytes are those of all heads
        (block(data=HALF[:-2]), "malformed"),
        (block(data=b""), "malformed"),
        (block(pages=3, layers=(0, 5)), "malformed"),  # over the block's bytes
        (block(place=Place("127.0.0.1:1", 0, 0)), "malformed"),
        (block(place=Place("127.0.0.1:1", 0, 0), frames=0), "malformed"),
        (block(digest=bytes(8)), "corrupt"),
        (block(data=bytes(len(HALF))), "corrupt"),
        (block(number=1), "lost"),
        (say(End, 2, ""), "lost"),
        (say(End, 0, "no reason"), "ended"),
        (lambda: [b"no header"], "corrupt"),
        (list, "corrupt"),
        (lambda: [encode(Grant(1))], "malformed"),  # what a receiver says
        (lambda: [encode(Alive()), b"more"], "malformed"),
    ],
)
def test_a_sender_that_breaks_the_protocol(frames: Callable[[], Frames], outcome: str) -> None:
    with transfer() as (sender, receiver, taker):
        sender.answer(lambda: frames() or [b""])
        assert taker.finish() == 0
        assert not taker.pages.any()
        assert receiver.stats.outcomes[outcome] == 1  # type: ignore[index]


def test_blocks_that_were_not_granted() -> None:
    count = iter(range(100))
    with transfer() as (sender, receiver, taker):
        sender.answer(lambda: block(number=next(count))(), copies=OPTIONS.window_blocks + 1)
        assert taker.finish(max_bytes=0) == 0
        assert receiver.stats.outcomes["malformed"] == 1


def test_the_right_block_is_taken() -> None:
    """So the others are rejected for what is wrong with them."""
    with transfer() as (sender, receiver, taker):
        sender.answer(block())
        wait_until(lambda: receiver.stats.blocks == 1)
        assert taker.take() == 1
        assert taker.pages[0, :2].tobytes() == HALF
        taker.fetch.close()
        assert receiver.stats.outcomes["dropped"] == 1
