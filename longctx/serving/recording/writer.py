"""Writes a log's records: the engine's thread only appends to a queue, and another thread writes what is there.

A file of records only grows: each is framed by a length and checksums, so that a torn end is told from damage. A
process that is killed leaves a file that ends within a frame: the rest of it is missing, and what is there is right.
That end is cut. Anything else that is wrong was changed later, and is an error.
"""

import contextlib
import logging
import os
import struct
import threading
import zlib
from collections import deque
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


_LOG = logging.getLogger(__name__)
_MAX_UNWRITTEN = 256 * 2**20  # bytes that wait for a disk that doesn't keep up

FLUSH_SECONDS = 0.1
"""Seconds after which what was recorded is in the file, at most: what a process that is killed may lose."""


class LogWriter:
    """Appends payloads to a file as frames.

    A write that fails, or a disk that doesn't keep up, ends the log with a warning; the engine goes on.

    Args:
      path: of a new file, which only its owner may read.

    Attributes:
      size: bytes of the file, with what is not written yet.
      is_open: whether it takes more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self.is_open = 0, True
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._waiting: deque[bytes] = deque()
        self._written = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="longctx-recorder", daemon=True)
        self._thread.start()

    def append(self, payload: bytes) -> None:
        """Write a payload soon; never waits. One thread at a time may call it."""
        if self.is_open:
            self._waiting.append(frame(payload, self.size) + payload)
            self.size += HEADER_BYTES + len(payload)
            if self.size - self._written > _MAX_UNWRITTEN:
                self.stop(f"the disk does not keep up: {_MAX_UNWRITTEN >> 20} MiB wait to be written")

    def finish(self) -> None:
        """Let what there is be written, and the file be closed, without waiting for it."""
        self.is_open = False
        self._is_closing.set()

    def remove(self) -> None:
        """Delete the file, if that can be done."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        """`finish`, and wait for it."""
        self.finish()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing.wait(FLUSH_SECONDS):
                self._flush()
            self._flush()
        except OSError as error:
            self.stop(str(error))
        finally:
            os.close(self._file)

    def _flush(self) -> None:
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        data = memoryview(b"".join(waiting))
        while data:
            count = os.write(self._file, data)
            self._written += count
            data = data[count:]

    def stop(self, cause: str | None) -> None:
        """Take no more; a cause is logged as a warning."""
        if self.is_open and cause is not None:
            _LOG.warning("longctx: %s is recorded no further: %s", self.path, cause)
        self.is_open = False
