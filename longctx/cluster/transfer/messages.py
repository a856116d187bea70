"""Messages between the two sides of a transfer between processes, and their wire format.

A message is one or two frames: a header, and for a block its bytes. The header is MessagePack and ends with 8 bytes
of XXH3 over what is before; it says what XXH3 the block's bytes have. Nothing that is read can name a type or run code.
"""

import math
from collections.abc import Sequence as List
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct

from longctx.cluster.transfer.stats import Outcome
from longctx.serving.kv_cache.connector import WHOLE, Needed
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice

VERSION = 4
_DIGEST_BYTES = 8
_MOST_TEXT = 500

Number = Annotated[int, Meta(ge=0, lt=2**31)]
Digest = Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
Text = Annotated[str, Meta(max_length=_MOST_TEXT)]
Range = tuple[Number, Number]


class Place(Struct, array_like=True, frozen=True):
    """Place of a block in registered memory of the sender: a segment of Mooncake's transfer engine, and a slot."""

    segment: Text
    address: int  # of 64 bits, so without the limit of other numbers
    slot: Number


class Open(Struct, tag=True, array_like=True, frozen=True):
    """Receiver: begin a transfer of these pages and this part of a lease, in blocks of at most `block_bytes`."""

    version: Number
    lease: Text
    keys: list[Annotated[bytes, Meta(max_length=64)]]
    layout: PageLayout
    fingerprint: Annotated[bytes, Meta(max_length=64)]
    layers: Range
    heads: Range
    block_bytes: Annotated[int, Meta(ge=1, lt=2**41)]
    lease_timeout: Number = 0  # milliseconds within which a lease that is not there yet may come
    needed: Needed = WHOLE


class Grant(Struct, tag=True, array_like=True, frozen=True):
    """Receiver: there is room for `blocks` more."""

    blocks: Number


class Pulled(Struct, tag=True, array_like=True, frozen=True):
    """Receiver: a block that lay in a slot has been read."""

    slot: Number


class Close(Struct, tag=True, array_like=True, frozen=True):
    """Receiver: send no more."""


class Release(Struct, tag=True, array_like=True, frozen=True):
    """Receiver: this lease is not needed any more."""

    lease: Text


class Alive(Struct, tag=True, array_like=True, frozen=True):
    """Sender: a sign of life, first when the transfer begins."""


class Block(Struct, tag=True, array_like=True, frozen=True):
    """Sender: `pages` pages from page `first` of the transfer on, of a range of layers and heads.

    `number` counts the blocks of a transfer. Their bytes are the second frame, or lie at `place`.
    """

    number: Number
    first: Number
    pages: Number
    layers: Range
    heads: Range
    digest: Digest
    place: Place | None = None


class End(Struct, tag=True, array_like=True, frozen=True):
    """Sender: there will be no more blocks than the `number` that were sent; why, if they are not all."""

    number: Number
    reason: Text


class Refused(Struct, tag=True, array_like=True, frozen=True):
    """Sender: the transfer does not begin; why."""

    reason: Text


FromReceiver = Open | Grant | Pulled | Close | Release
FromSender = Alive | Block | End | Refused
TO_SENDER = msgspec.msgpack.Decoder(FromReceiver)
TO_RECEIVER = msgspec.msgpack.Decoder(FromSender)
_ENCODER = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


class Malformed(ValueError):
    """A message that is none of the protocol; or one of its kinds below."""

    outcome: Outcome = "malformed"


class Corrupt(Malformed):
    """Bytes whose checksum is wrong."""

    outcome = "corrupt"


class Lost(Malformed):
    """A message between two others has not come."""

    outcome = "lost"


def encode(message: FromReceiver | FromSender) -> bytes:
    """Make the header of a message."""
    header = _ENCODER.encode(message)
    return header + xxhash.xxh3_64_digest(header)


def decode(header: Any, decoder: "msgspec.msgpack.Decoder[_T]") -> _T:
    """Read a header, with the decoder of the side that reads it.

    Raises:
      Corrupt: the checksum is wrong. Malformed: it is right, and the header is none.
    """
    view = memoryview(header)
    contents, digest = view[:-_DIGEST_BYTES], view[-_DIGEST_BYTES:]
    if xxhash.xxh3_64_digest(contents) != digest:
        raise Corrupt("the header of a message has a wrong checksum")
    try:
        return decoder.decode(contents)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(f"a message can't be read: {shorten(str(error))}") from None


def digest_of(data: Any) -> bytes:
    """Compute the XXH3 of a block's bytes."""
    return xxhash.xxh3_64_digest(data)


def part_of(message: Open | Block) -> PageSlice:
    """Return the layers and heads that a message names."""
    return PageSlice(message.layers, message.heads)


def to_array(data: Any, digest: bytes, shape: List[int], layout: PageLayout) -> np.ndarray:
    """View a block's bytes as an array, without a copy.

    Raises:
      Malformed: it has not as many bytes as it says. Corrupt: its checksum is wrong.
    """
    num_bytes = math.prod(shape) * layout.bits.itemsize
    if len(data) != num_bytes:
        raise Malformed(f"a block of shape {shape} must have {num_bytes} bytes, got {len(data)}")
    if digest_of(data) != digest:
        raise Corrupt("the bytes of a block have a wrong checksum")
    return np.frombuffer(data, np.uint8).view(layout.bits).reshape(shape)


def shorten(text: str) -> str:
    """Shorten a text of another process for a message or a log, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:_MOST_TEXT])
