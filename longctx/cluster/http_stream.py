"""`HttpStream`: requests whose answers are read as they come, over connections that are kept.

httpx's own pool asks the system about each idle connection at each request, and parses in Python: with thousands of
events a second, and news of each instance four times a second, that is most of what a router would do. Here the parser
is uvicorn's, connections say themselves that they are closed, and what comes is handed over at once, without a task
that has to wake up for it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import httptools
import httpx

from longctx.serving.server.tls import Tls

_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 30.0  # for which a connection is kept: less than a server keeps it
_END_SECONDS = 1.0  # for which the end of an answer is awaited that has nothing more in it


class Head(NamedTuple):
    """Head of an answer."""

    status: int
    headers: Mapping[str, str]


Read = Callable[[Head | bytes], bool | None]
"""Is called with the head of an answer, then with its body as it comes; True: nothing more is wanted of it."""


class HttpStream:
    """Client of one server. For the event loop.

    Args:
      url: of the server, from `check_server_url`.
      silence: seconds for which nothing may come, until it is given up.
      tls: of this server; None: the other has a certificate of a CA that the system knows.
    """

    def __init__(self, url: str, silence: float = 60.0, tls: Tls | None = None) -> None:
        parts = httpx.URL(url)
        self._is_encrypted, self._silence, self._tls = parts.scheme == "https", silence, tls
        self._host, self._port = parts.host, parts.port or (443 if self._is_encrypted else 80)
        self._authority = parts.netloc.decode("ascii")
        self._idle: deque[tuple[float, _Connection]] = deque()

    async def fetch(
        self, method: str, path: str, headers: Mapping[str, str], seconds: float, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer, which must be there within some seconds; errors as of `send`."""
        parts: list[Head | bytes] = []
        try:
            async with asyncio.timeout(seconds):
                await self.send(method, path, headers, body, parts.append)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer has come within {seconds:g} s") from None
        status = next(part.status for part in parts if isinstance(part, Head))
        return status, b"".join([part for part in parts if isinstance(part, bytes)])

    async def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        read: Read,
        silence: float | None = None,
    ) -> None:
        """Send a request, and read its answer to its end.

        A connection whose answer was not read to its end is closed. An exception of `read` ends the answer.

        Args:
          silence: instead of that of all answers.

        Raises:
          httpx.ConnectError: the server can't be reached.
          httpx.ReadError: its connection breaks, or what it sends is no HTTP.
          httpx.ReadTimeout: nothing has come for too long.
        """
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._authority}", f"content-length: {len(body)}"]
        head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")
        silence = self._silence if silence is None else silence
        connection, is_new = await self._connect()
        try:
            try:
                await connection.exchange([head, body], read, silence)
            except httpx.ReadError:
                if is_new or connection.has_received:
                    raise
                connection.close()  # it was closed while it was idle
                connection = await self._open()
                await connection.exchange([head, body], read, silence)
        finally:
            if connection.is_reusable:
                self._idle.append((time.monotonic() + _IDLE_SECONDS, connection))
            else:
                connection.close()

    def close(self) -> None:
        """Close connections that are idle."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _connect(self) -> "tuple[_Connection, bool]":
        """Return a connection, and whether it is a new one."""
        now = time.monotonic()
        while self._idle and (self._idle[0][0] < now or self._idle[0][1].is_lost):
            self._idle.popleft()[1].close()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_reusable:
                return connection, False
        return await self._open(), True

    async def _open(self) -> "_Connection":
        encrypted = (True if self._tls is None else self._tls.client) if self._is_encrypted else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return (await loop.create_connection(_Connection, self._host, self._port, ssl=encrypted))[1]
        except (OSError, TimeoutError) as error:
            message = str(error) or f"nobody answers within {_CONNECT_SECONDS:.0f} s"
            raise httpx.ConnectError(message) from None


class _Connection(asyncio.Protocol):
    """Connection for one request at a time.

    Attributes:
      is_lost: it is closed, or about to be.
      has_received: something of the answer.
    """

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.is_lost = self.has_received = self._is_complete = self._is_kept = False
        self._ended: asyncio.Future[None] | None = None  # of the answer that is being read

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent: the last answer is complete, and the connection is there."""
        return self._is_complete and self._is_kept and not self.is_lost

    async def exchange(self, request: list[bytes], read: Read, silence: float) -> None:
        """Send a request, and have its answer read to its end; errors as of `HttpStream.send`."""
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._parts: list[Head | bytes] = []
        self._is_complete = self._is_kept = self.has_received = self._is_enough = False
        self._read, self._silence, self._heard = read, silence, self._loop.time()
        self._ended = self._loop.create_future()
        self._timer = self._loop.call_later(silence, self._look)
        try:
            if self.is_lost:
                self._end(httpx.ReadError("it was closed"))
            else:
                self._transport.writelines(request)
            await self._ended
        finally:
            self._timer.cancel()
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # of a task that was cancelled at the same time
            self._ended = None

    def close(self) -> None:
        self.is_lost = True
        self._transport.abort()

    def _look(self) -> None:
        """End an answer of which nothing has come for too long."""
        left = self._heard + self._silence - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._end(httpx.ReadTimeout(f"nothing has come for {self._silence:.0f} s"))

    def _end(self, error: Exception | None = None) -> None:
        if self._ended is not None and not self._ended.done():
            if error is None or self._is_enough:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    # The event loop calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():  # nothing was asked
            self.close()
            return
        self._heard, self.has_received = self._loop.time(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(httpx.ReadError(f"what it sends is no HTTP: {error}"))
            self.close()
            return
        parts, self._parts = self._parts, []
        try:
            for part in parts:
                if not self._is_enough and self._read(part):
                    self._is_enough, self._silence = True, _END_SECONDS
                    self._timer.cancel()
                    self._look()
        except Exception as error:
            self._is_complete = False  # whoever reads has not read it
            self._end(error)
        else:
            if self._is_complete:
                self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._end(httpx.ReadError(str(error) or type(error).__name__ if error else "it was closed"))

    # The parser calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._parts.append(Head(self._parser.get_status_code(), self._headers))

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_complete, self._is_kept = True, self._parser.should_keep_alive()
