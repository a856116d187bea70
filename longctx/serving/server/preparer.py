"""`Preparer`: reads calls outside of the event loop's and the engine's threads, where that takes long."""

import asyncio
import multiprocessing
import os
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from longctx.serving.server.errors import ApiError
from longctx.serving.server.read_call import CallReader, Kind, Origin, read
from longctx.serving.worker_process import follow_parent

_THREADS = 4
SHORT_BYTES, LONG_BYTES = 2**11, 2**15
"""Bodies up to the first are read at once, which is quicker than to hand them over; those from the second in a process,
since whoever tokenises and hashes holds the interpreter's lock."""


class Preparer:
    """Reads bodies: short ones where it is called, others in threads, long ones in processes.

    Args:
      num_processes: 0: threads read the long ones too.
    """

    def __init__(self, reader: CallReader, num_processes: int) -> None:
        self.reader, self._num_processes = reader, num_processes
        self._threads = ThreadPoolExecutor(_THREADS, "longctx-prepare")
        self._processes: ProcessPoolExecutor | None = None

    def start(self) -> None:
        """Start the processes now, rather than with the first long prompt."""
        if self._num_processes:
            for _ in range(self._num_processes):
                self._pool().submit(os.getpid)

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that run."""
        # The pool has no other way to tell.
        return [] if self._processes is None else list(self._processes._processes)

    async def read(self, kind: Kind, body: bytes, origin: Origin) -> Any:
        """See `read_call.read`: a `Call`, or what else the kind gives."""
        size = len(body) if origin.prefix is None else len(body) + origin.prefix.num_bytes
        is_long = size >= LONG_BYTES and self._num_processes > 0
        if size <= SHORT_BYTES and kind not in ("chat", "cache"):
            return read(self.reader, kind, body, origin)
        # A chat template is rendered by a process of its own, for which only a thread may wait.
        loop = asyncio.get_running_loop()
        if not is_long:
            return await loop.run_in_executor(self._threads, read, self.reader, kind, body, origin)
        pool: Executor = self._pool()
        try:
            return await loop.run_in_executor(pool, _read_there, kind, body, origin)
        except BrokenProcessPool:
            if self._processes is pool:  # the next call starts another one
                self._processes = None
            message = "the process that read the prompt has ended: memory may be short"
            raise ApiError(503, message, code="server_is_overloaded", retry_after=1.0) from None

    def close(self) -> None:
        """End threads and processes; what they are reading is thrown away."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.shutdown(wait=False, cancel_futures=True)

    def _pool(self) -> ProcessPoolExecutor:
        if self._processes is None:
            self._processes = ProcessPoolExecutor(
                self._num_processes, multiprocessing.get_context("spawn"), _begin, (self.reader,)
            )
        return self._processes


_reader: CallReader


def _begin(reader: CallReader) -> None:
    """In a new process: keep the reader."""
    global _reader
    _reader = reader
    follow_parent()


def _read_there(kind: Kind, body: bytes, origin: Origin) -> Any:
    return read(_reader, kind, body, origin)
