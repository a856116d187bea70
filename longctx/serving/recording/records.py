"""Records of a log: MessagePack by msgspec, each in a frame with its length and checksums.

Decisions follow from lengths, from the keys of pages, from times and from where completions end. These are all that a
log holds: it has no token of a prompt or an output.

A file of records only grows. A process that is killed leaves a file that ends within a frame: that end is cut, and what
is before it is right. Anything else that is wrong was changed later, and is an error.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from longctx.serving.kv_cache.prefix import KEY_BYTES, PartialPage

STOP, NOT_FINITE = 1, 2
"""Why a completion ended, other than by its length."""


class Arrived(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A request has entered. `keys`: of the full pages of its prompt, joined; `partial_page`: found of its session."""

    request_id: str
    now: float
    num_prompt: int
    max_tokens: int
    num_completions: int
    priority: int
    tenant: str
    ttft_deadline: float | None
    tpot_target: float | None
    may_share: bool
    has_session: bool
    keys: bytes
    partial_page: PartialPage | None
    available: int  # leading tokens that could be loaded
    lease: str | None


class Cancelled(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """A request has been cancelled; `left` as in `Ended`."""

    request_id: str
    now: float
    left: tuple[PartialPage | None, ...]


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """The results of a step's oldest batch, taken at `finished`.

    `ends`: which of its samples, by number, ended their completions, and why. `keys`: of the pages that generated
    tokens filled, in order, joined. `left`: last pages of sessions whose turns ended.
    """

    finished: float
    duration: float
    is_exact: bool
    ends: tuple[tuple[int, int], ...]
    keys: bytes
    left: tuple[PartialPage | None, ...]


class Step(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """A step was planned at time `now`; `digest` is of all plans until then."""

    now: float
    digest: bytes
    ended: Ended | None


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """The engine has failed."""

    cause: str


class Closed(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """The recorder was closed in order, or stopped: `reason` says why."""

    reason: str


class LoadEnded(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """A load has ended, see `Loaded`."""

    name: str
    num_pages: int
    seconds: float


class Released(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """A lease has ended."""

    lease_id: str


Record = Arrived | Cancelled | Step | Failed | Closed | LoadEnded | Released

encode = msgspec.msgpack.Encoder().encode
_DECODER = msgspec.msgpack.Decoder(Record)


def decode(payload: bytes) -> Record:
    """Decode a record; raise ValueError if it is none."""
    try:
        record: Record = _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"a record is not as this version of longctx writes it: {error}") from None
    return record


def split_keys(joined: bytes) -> list[bytes]:
    """Return keys that were joined."""
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]


_HEADER = struct.Struct("<III")  # length, checksum of length and place, checksum of the payload
_LENGTH = struct.Struct("<IQ")
HEADER_BYTES = _HEADER.size


def frame(payload: bytes, place: int) -> bytes:
    """Return a payload in its frame, which begins at byte `place` of its file."""
    length = len(payload)
    return _HEADER.pack(length, zlib.crc32(_LENGTH.pack(length, place)), zlib.crc32(payload)) + payload


def read_frames(path: Path) -> Iterator[bytes]:
    """Yield the payloads of a file, without one that is torn at its end.

    Raises:
      ValueError: the file is damaged.
    """
    with path.open("rb") as file:
        place = 0
        while len(header := file.read(HEADER_BYTES)) == HEADER_BYTES:
            length, place_sum, payload_sum = _HEADER.unpack(header)
            if place_sum != zlib.crc32(_LENGTH.pack(length, place)):
                raise ValueError(f"{path} is damaged at byte {place}: no record begins there")
            payload = file.read(length)
            if len(payload) < length:
                return
            if zlib.crc32(payload) != payload_sum:
                raise ValueError(f"{path} is damaged in the record at byte {place}: its checksum is wrong")
            yield payload
            place += HEADER_BYTES + length
