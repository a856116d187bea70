"""Reading of requests: bodies of bounded size, and their parsing outside of the event loop's thread."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from longctx.serving.server.auth import too_large
from longctx.serving.server.errors import DROPPED, ApiError
from longctx.serving.server.request_parser import Kind, Origin, RequestParser, parse_body, parse_fields
from longctx.serving.server.settings import ServerSettings

_Model = TypeVar("_Model", bound=BaseModel)

_LARGEST = 4  # bodies of the largest size that are held at once, or as many smaller ones
_RETRY = 1.0  # seconds


class Bodies:
    """Bodies that are being received or parsed, of a bounded total size: admission counts only what is parsed."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body of a request, which is held meanwhile.

        It must be JSON by its header, which no form of a web page is.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(415, f"the header Content-Type must be application/json, got {kind[:80]!r}")
        parts: list[bytes] = []
        try:
            async for part in self._parts(request):
                parts.append(part)
            body = b"".join(parts)
            yield body
        finally:
            self._held -= sum(map(len, parts))

    async def _parts(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body's parts, which count as held from now on."""
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                async for part in request.stream():
                    size += len(part)
                    self._hold(len(part), size)
                    yield part
        except TimeoutError:
            message = f"the body must be there within {self._settings.body_timeout:g} seconds"
            raise ApiError(408, message, headers={"connection": "close", "x-should-retry": "false"}) from None
        except ClientDisconnect:
            raise ApiError(400, "the client left while it sent the body") from None

    async def fields(self, request: Request, model: type[_Model]) -> _Model:
        """Return the fields of a body; raise ApiError as `read` does, or if they are not those of the model."""
        async with self.read(request) as body:
            return parse_fields(model, body)

    def _hold(self, more: int, size: int) -> None:
        """Count more bytes of a body as held; `size` includes them."""
        most = self._settings.max_body_bytes
        if size > most:
            raise too_large(most)
        if self._held + more > _LARGEST * most:
            headers = {"connection": "close", DROPPED: "queue"}
            raise ApiError(429, "too many long prompts are being read", None, "slow_down", _RETRY, headers)
        self._held += more


_THREADS = 4
SHORT_BYTES, LONG_BYTES = 2**11, 2**15
"""Bodies up to the first are read at once, which is quicker than to hand them over; those from the second in a process,
since tokenising and hashing hold the interpreter's lock."""


class Preparer:
    """Parser that runs where it is called for short bodies, in threads for others, and in processes for long ones."""

    def __init__(self, parser: RequestParser, num_processes: int) -> None:
        self.parser, self._num_processes = parser, num_processes
        self._threads = ThreadPoolExecutor(_THREADS, "longctx-prepare")
        self._processes: ProcessPoolExecutor | None = None

    def start(self) -> None:
        """Start the processes now, rather than with the first long prompt."""
        if self._num_processes:
            for _ in range(self._num_processes):
                self._pool().submit(os.getpid)

    async def read(self, kind: Kind, body: bytes, origin: Origin) -> Any:
        """Parse a body, see `parse_body`: return a `ParsedCall`, or what else the kind gives."""
        size = len(body) if origin.prefix is None else len(body) + origin.prefix.num_bytes
        is_long = size >= LONG_BYTES and self._num_processes > 0
        if size <= SHORT_BYTES and kind not in ("chat", "cache"):
            return parse_body(self.parser, kind, body, origin)
        # A chat template is rendered by a process of its own, for which only a thread may wait.
        loop = asyncio.get_running_loop()
        if not is_long:
            return await loop.run_in_executor(self._threads, parse_body, self.parser, kind, body, origin)
        pool: Executor = self._pool()
        try:
            return await loop.run_in_executor(pool, _read_there, kind, body, origin)
        except BrokenProcessPool:
            if self._processes is pool:  # the next call starts another one
                self._processes = None
            message = "the process that read the prompt has ended: memory may be short"
            raise ApiError(503, message, code="server_is_overloaded", retry_after=1.0) from None

    def close(self) -> None:
        """End threads and processes; what they are parsing is discarded."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.shutdown(wait=False, cancel_futures=True)

    def _pool(self) -> ProcessPoolExecutor:
        if self._processes is None:
            self._processes = ProcessPoolExecutor(
                self._num_processes, multiprocessing.get_context("spawn"), _begin, (self.parser,)
            )
        return self._processes


_parser: RequestParser


def _begin(parser: RequestParser) -> None:
    """Keep the parser, in a new process that ends with its parent, however that ends."""
    global _parser
    _parser = parser
    for number in (signal.SIGINT, signal.SIGTERM):  # which the parent acts on
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _read_there(kind: Kind, body: bytes, origin: Origin) -> Any:
    return parse_body(_parser, kind, body, origin)
