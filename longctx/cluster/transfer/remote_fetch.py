"""Receiving side of one transfer between processes: what was asked for, from which senders, and what may still come."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.cluster.transfer.messages import (
    Block,
    Corrupt,
    FromReceiver,
    Malformed,
    digest_of,
    encode,
    part_of,
    to_array,
)
from longctx.cluster.transfer.stats import Outcome, TransferStats
from longctx.serving.distributed.network import Network, Socket
from longctx.serving.kv_cache.arrivals import Arrivals
from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key

_LOG = logging.getLogger(__name__)
_LOSSES = zmq.EVENT_DISCONNECTED
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Lost(ValueError):
    """A message between two others has not come."""


class NoRoom(Exception):
    """There are as many connections as there may be, and none is idle."""


class RemoteFetch(Arrivals):
    """A load, which comes in one stream, or in one from each process of an engine.

    Args:
      part: what is wanted of each page.
      deadline: in `time.monotonic`.
    """

    def __init__(
        self,
        keys: list[Key],
        part: PageSlice,
        deadline: float,
        wake: Callable[[], Any],
        on_taken: Callable[["Stream"], None],
        on_close: Callable[["RemoteFetch"], None],
        stats: TransferStats,
    ) -> None:
        super().__init__(len(keys), part, wake, on_taken, lambda: on_close(self), stats.add_outcome)
        self.keys, self.part, self.deadline = keys, part, deadline
        self.streams: list[Stream] = []

    @property
    def has_ended(self) -> bool:
        """Whether all streams have ended, and every block of them is there."""
        return all(stream.num_sent == stream.num_ready for stream in self.streams)


@dataclass(eq=False)
class Stream:
    """Blocks that one process sends.

    Attributes:
      number: of the stream in all messages.
      granted: blocks that may still come. held: blocks that have come and wait for the engine.
      heard: when its sender was heard last.
      num_come, num_ready: blocks that were announced, and those whose bytes are there. num_sent: of all, once known.
    """

    number: int
    fetch: RemoteFetch
    peer: "Peer"
    granted: int = 0
    held: int = 0
    heard: float = field(default_factory=time.monotonic)
    is_open: bool = False
    num_come: int = 0
    num_ready: int = 0
    num_sent: int | None = None
    reason: str = ""

    def announce(self, message: Block, layout: PageLayout, block_bytes: int) -> tuple[int, ...]:
        """Check what a sender says of its next block, and return the shape of its array.

        Raises:
          Lost: a block before it is missing. Malformed: it is none of this transfer.
        """
        if not self.is_open or self.num_sent is not None:
            raise Malformed("a block before the transfer was opened or after its end")
        if message.number != self.num_come:
            raise Lost(f"block {self.num_come} was lost: the next one received was {message.number}")
        part = part_of(message)
        try:
            layout.check_part(part)
        except ValueError as error:
            raise Malformed(f"a block of no such part: {error}") from None
        num_pages = len(self.fetch.keys)
        if part.intersect(self.fetch.part) != part or not 0 < message.pages <= num_pages - message.first:
            raise Malformed(f"a block that nobody asked for: {message.pages} pages from {message.first}, {part}")
        (layer, last_layer), (head, last_head) = part
        shape = (message.pages, last_layer - layer, 2, layout.page_size, last_head - head, layout.row_size)
        if int(np.prod(shape)) * layout.bits.itemsize > block_bytes:
            raise Malformed(f"a block of shape {shape}, which is over {block_bytes} bytes")
        self.num_come += 1
        return shape


def read_block(message: Block, data: Any, shape: tuple[int, ...], layout: PageLayout) -> PageBlock:
    """Make a block from its message and its bytes, without a copy.

    Raises:
      Malformed: it has not as many bytes as it says. Corrupt: its checksum is wrong.
    """
    num_bytes = int(np.prod(shape)) * layout.bits.itemsize
    if len(data) != num_bytes:
        raise Malformed(f"a block of shape {shape} must have {num_bytes} bytes, got {len(data)}")
    if digest_of(data) != message.digest:
        raise Corrupt("the bytes of a block have a wrong checksum")
    return PageBlock(message.first, part_of(message), to_array(data, shape, layout))


class Peer:
    """Connection of a receiver to a sender."""

    def __init__(self, network: Network, key: Any, address: str, max_bytes: int) -> None:
        self.address, self.network = address, network
        self.streams: dict[int, Stream] = {}
        self.used = time.monotonic()
        self._has_failed = False
        self.socket: Socket = network.connect(zmq.DEALER, key)
        try:
            self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            self.socket.setsockopt(zmq.IPV6, int("[" in address))
            self.monitor = self.socket.get_monitor_socket(_LOSSES | _REFUSALS)
            self.socket.connect(f"tcp://{address}")
        except Exception:
            network.drop(self.socket)
            raise

    def send(self, message: FromReceiver) -> None:
        """Send a message; `read_failure` returns an error later, so that transfers from other senders go on."""
        if self.socket.closed:
            return
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the connection has just broken, which its monitor tells
        except zmq.ZMQError:
            _LOG.exception("longctx: nothing can be sent to %s", self.address)
            self._has_failed = True

    def read_failure(self) -> Outcome | None:
        """Return whether the connection failed, or was lost or refused since the last call."""
        failure: Outcome | None = "failed" if self._has_failed else None
        while self.monitor.poll(0):
            failure = "lost" if recv_monitor_message(self.monitor)["event"] & _LOSSES else "refused"
        return failure

    def close(self) -> None:
        self.network.drop(self.socket)
        self.monitor.close(linger=0)
