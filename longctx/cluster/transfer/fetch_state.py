"""The receiving side of one transfer: what has been asked for, from whom, and what may still come."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longctx.cluster.transfer.arrivals import Arrivals
from longctx.cluster.transfer.credits import Credit
from longctx.cluster.transfer.export import check_part
from longctx.cluster.transfer.messages import Block, Corrupt, Malformed, digest_of, part_of, to_array
from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key


class Lost(ValueError):
    """A message between two others has not come."""


@dataclass(eq=False)
class Fetch:
    """A load, which comes in one stream, or in one from each process of an engine.

    Attributes:
      part: what is wanted of each page.
      deadline: in `time.monotonic`.
      patience: seconds in which the lease may come.
    """

    addresses: list[str]
    lease_id: str
    keys: list[Key]
    part: PageSlice
    deadline: float
    release: bool
    patience: float = 0.0
    arrivals: Arrivals = None  # type: ignore[assignment]  # is told of the fetch
    streams: list["Stream"] = field(default_factory=list)

    @property
    def is_ended(self) -> bool:
        """Whether all streams have ended, and every block of them is there."""
        return all(stream.num_sent == stream.num_ready for stream in self.streams)


@dataclass(eq=False)
class Stream:
    """What one process sends.

    Attributes:
      number: of the stream in all messages.
      heard: when its sender was heard last.
      num_come, num_ready: blocks that were announced, and those whose bytes are there. num_sent: of all, once known.
    """

    number: int
    fetch: Fetch
    peer: Any
    credit: Credit
    heard: float = field(default_factory=time.monotonic)
    is_open: bool = False
    num_come: int = 0
    num_ready: int = 0
    num_sent: int | None = None
    reason: str = ""

    def check(self, message: Block, layout: PageLayout, block_bytes: int) -> tuple[int, ...]:
        """Check what a sender says of a block, and return the shape of its array.

        Raises:
          Lost: a block before it is missing. Malformed: it is none of this transfer.
        """
        if not self.is_open or self.num_sent is not None:
            raise Malformed("a block before the transfer was opened or after its end")
        if message.number != self.num_come:
            raise Lost(f"block {self.num_come} was lost: the next one received was {message.number}")
        part = part_of(message)
        try:
            check_part(part, layout)
        except ValueError as error:
            raise Malformed(f"a block of no such part: {error}") from None
        if part.intersect(self.fetch.part) != part or not (
            message.pages > 0 and message.first + message.pages <= len(self.fetch.keys)
        ):
            raise Malformed(
                f"a block that nobody asked for: pages from {message.first}, {message.pages} of them, {part}"
            )
        (layer, last_layer), (head, last_head) = part
        shape = (message.pages, last_layer - layer, 2, layout.page_size, last_head - head, layout.row_size)
        if int(np.prod(shape)) * layout.bits.itemsize > block_bytes:
            raise Malformed(f"a block of shape {shape}, which is over {block_bytes} bytes")
        self.num_come += 1
        return shape


def read_block(message: Block, data: Any, shape: tuple[int, ...], layout: PageLayout) -> PageBlock:
    """A block from its message and its bytes, without a copy.

    Raises:
      Malformed: it has not as many bytes as it says. Corrupt: its checksum is wrong.
    """
    num_bytes = int(np.prod(shape)) * layout.bits.itemsize
    if len(data) != num_bytes:
        raise Malformed(f"a block of shape {shape} must have {num_bytes} bytes, got {len(data)}")
    if digest_of(data) != message.digest:
        raise Corrupt("the bytes of a block have a wrong checksum")
    return PageBlock(message.first, part_of(message), to_array(data, shape, layout))
