"""Writes a log's records: the engine's thread only appends to a queue, and another thread writes what is there."""

import contextlib
import logging
import os
import threading
from collections import deque
from pathlib import Path

from longctx.serving.recording.frames import HEADER_BYTES, frame

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
