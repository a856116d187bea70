"""`HttpStream`: POST requests whose answers are read as they come, over connections that are kept.

httpx's own pool asks the system about each idle connection at each request, and parses in Python: with thousands of
events a second that is most of what a router would do. Here the parser is uvicorn's, and connections say themselves
that they are closed: 2.6 us of CPU for an event of 8 streams, against httpx's 15 (on one core of a virtual machine).
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

import httptools
import httpx

from longctx.serving.server.tls import Tls

_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 30.0  # for which a connection is kept: less than a server keeps it
_MOST_BUFFERED = 2**20  # bytes that are not read yet, before the sender has to wait


class Head(NamedTuple):
    """Head of an answer."""

    status: int
    headers: Mapping[str, str]


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

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> AsyncGenerator[Head | bytes]:
        """Yield the head of the answer, then its body as it comes.

        A connection whose answer was not read to its end is closed.

        Raises:
          httpx.ConnectError: the server can't be reached.
          httpx.ReadError: its connection breaks, or what it sends is no HTTP.
          httpx.ReadTimeout: nothing has come for too long.
        """
        lines = [f"POST {path} HTTP/1.1", f"host: {self._authority}", f"content-length: {len(body)}"]
        head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")
        connection, is_new = await self._connect()
        try:
            connection.send(head, body)
            try:
                answer = await connection.head(self._silence)
            except httpx.ReadError:
                if is_new or connection.has_received:
                    raise
                connection.close()  # it was closed while it was idle
                connection, is_new = await self._open(), True
                connection.send(head, body)
                answer = await connection.head(self._silence)
            yield answer
            while (part := await connection.read(self._silence)) is not None:
                yield part
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
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                streams = await asyncio.open_connection(self._host, self._port, limit=_MOST_BUFFERED, ssl=encrypted)
        except (OSError, TimeoutError) as error:
            message = str(error) or f"nobody answers within {_CONNECT_SECONDS:.0f} s"
            raise httpx.ConnectError(message) from None
        return _Connection(*streams)


class _Connection:
    """Connection for one request at a time.

    Attributes:
      has_received: something of the answer.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    # `HttpStream` calls these.

    @property
    def is_lost(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._reader.at_eof() or self._reader.exception() is not None or self._writer.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent: the last answer is complete, and the connection is there."""
        return self._is_complete and self._is_kept and not self.is_lost

    def send(self, head: bytes, body: bytes) -> None:
        """Begin a request, and forget what is there of an answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._head: Head | None = None
        self._parts: list[bytes] = []
        self._is_complete = self._is_kept = self.has_received = False
        self._writer.writelines([head, body])

    async def head(self, silence: float) -> Head:
        """Wait for the head of the answer."""
        while self._head is None:
            await self._receive(silence)
        return self._head

    async def read(self, silence: float) -> bytes | None:
        """Wait for what follows of the body; None: it is complete."""
        while not self._parts:
            if self._is_complete:
                return None
            await self._receive(silence)
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def close(self) -> None:
        self._writer.transport.abort()

    async def _receive(self, silence: float) -> None:
        try:
            async with asyncio.timeout(silence):
                data = await self._reader.read(_MOST_BUFFERED)
        except TimeoutError:
            raise httpx.ReadTimeout(f"nothing has come for {silence:.0f} s") from None
        except OSError as error:
            raise httpx.ReadError(str(error) or type(error).__name__) from None
        if not data:
            raise httpx.ReadError("it was closed")
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            raise httpx.ReadError(f"what it sends is no HTTP: {error}") from None

    # The parser calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head = Head(self._parser.get_status_code(), self._headers)

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_complete, self._is_kept = True, self._parser.should_keep_alive()
