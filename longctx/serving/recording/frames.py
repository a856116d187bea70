"""Framed records in a file that only grows: each has a length and checksums, so that a torn end is told from damage.

A process that is killed leaves a file that ends anywhere within a frame: the rest of it is missing, and what is there
is right. That end is cut. Anything else that is wrong was changed later, and is an error.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_HEADER = struct.Struct("<III")  # length, checksum of length and place, checksum of the payload
_LENGTH = struct.Struct("<IQ")
MAX_PAYLOAD = 2**31


def frame(payload: bytes, place: int) -> bytes:
    """The header of a payload that lies at byte `place` of its file."""
    length = len(payload)
    return _HEADER.pack(length, zlib.crc32(_LENGTH.pack(length, place)), zlib.crc32(payload))


HEADER_BYTES = _HEADER.size


def read_frames(path: Path, torn: list[int]) -> Iterator[bytes]:
    """The payloads of a file.

    Args:
      torn: gets the number of bytes of a torn end that is cut, if there is one.

    Raises:
      ValueError: the file is damaged.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        place = 0
        while place < size:
            payload = _read_frame(file, place, size, path)
            if payload is None:
                torn.append(size - place)
                return
            yield payload
            place += HEADER_BYTES + len(payload)


def _read_frame(file: BinaryIO, place: int, size: int, path: Path) -> bytes | None:
    """The payload at a place; None: the file ends within it."""
    if size - place < HEADER_BYTES:
        return None
    length, place_sum, payload_sum = _HEADER.unpack(file.read(HEADER_BYTES))
    if place_sum != zlib.crc32(_LENGTH.pack(length, place)) or length > MAX_PAYLOAD:
        raise ValueError(f"{path} is damaged at byte {place}: no record begins there")
    if size - place - HEADER_BYTES < length:
        return None
    payload = file.read(length)
    if zlib.crc32(payload) != payload_sum:
        raise ValueError(f"{path} is damaged in the record at byte {place}: its checksum is wrong")
    return payload
