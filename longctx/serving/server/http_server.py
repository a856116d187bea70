"""HTTP server under the app: uvicorn, with limits on headers, and a shutdown that lets running requests finish."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from asyncio import TimerHandle
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from longctx.serving.server.app import make_app
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.server import Server
from longctx.serving.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_SIGNAL = 0.5  # seconds; some programs send a signal twice
_LAST_ANSWERS = 2  # seconds for what clients have not taken yet, at the very end
_POLL = 0.05
_SEND_BUFFER = 128 * 2**10  # bytes of a connection in the system: a client that takes nothing is noticed soon
_BACKLOG, _KEEP_ALIVE = 2048, 75


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on headers and on clients that do not read.

    They are on the size of headers and the time until they are there, and on how long a client may take nothing of what
    is sent to it. A subclass has the `settings`.
    """

    settings: ServerSettings

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes = 0
        self._is_too_large = False
        self._late: TimerHandle | None = None
        self._stuck: TimerHandle | None = None
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # What has been written waits for the client; closing would wait for it too.
        self._stuck = self.loop.call_later(self.settings.slow_reader_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._late is not None and not self.transport.is_closing():
            # The parser keeps an unfinished header to itself.
            with contextlib.suppress(_TooLarge):
                self._count(len(data))
                return
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        self._end_waiting()
        super().send_400_response("The headers are too large." if self._is_too_large else msg)

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._await_headers()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._count(len(self.url))
        self._end_waiting()
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.settings.max_header_bytes:
            self._is_too_large = True
            raise _TooLarge

    def _await_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.settings.header_timeout, self.transport.close)

    def _end_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _TooLarge(Exception):
    """Headers are larger than they may be; the parser makes a bad request of it."""


class HttpServer(uvicorn.Server):
    """Serves a `Server`, or another `Frontend` with its app, until a signal comes.

    After the first SIGTERM or SIGINT, new requests get 503, while health and metrics still answer; running ones may
    finish within `shutdown_timeout`, and what has not is cancelled. A second signal ends the process at once.

    Attributes:
      loop: that serves, once it runs.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, server: Frontend, host: str = "127.0.0.1", port: int = 0, app: ASGIApp | None = None) -> None:
        if app is None:
            assert isinstance(server, Server), "only an engine's server has an app by itself"
            app = make_app(server)
        protocol = type("Protocol", (LimitedProtocol,), {"settings": server.settings})
        config = uvicorn.Config(
            app,
            host,
            port,
            http=protocol,
            ws="none",
            loop="uvloop",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_ANSWERS,
        )
        super().__init__(config)
        self.server = server
        self._signalled: float | None = None
        self._ending: asyncio.Task[None] | None = None

    def begin_shutdown(self) -> None:
        """Drain, then exit; call it in the event loop."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._drain())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; unlike uvicorn's, it does not raise them again at the end, so that the exit status is 0."""
        self.loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled is None:
            self._signalled = now
            self.loop.call_soon_threadsafe(self.begin_shutdown)
        elif now - self._signalled > _SAME_SIGNAL:
            os.write(2, b"longctx: ended by a second signal\n")
            os._exit(128 + sig)

    async def _drain(self) -> None:
        server = self.server
        logger.info("shutting down: %d calls are still running", len(server.calls))
        server.drain()
        end = time.monotonic() + server.settings.shutdown_timeout
        while server.has_calls and time.monotonic() < end:
            await asyncio.sleep(_POLL)
        for call in list(server.calls.values()):
            call.cancel()
        end = time.monotonic() + _LAST_ANSWERS
        while server.has_calls and time.monotonic() < end:
            await asyncio.sleep(_POLL)
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Return a socket for `HttpServer.run`, which does not listen yet."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port must be 0 to 65535, got {port}")
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, number)
    except OSError as error:
        raise ValueError(f"--host {host} can't be resolved: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it
        bound.bind(address)
    except OSError as error:
        bound.close()
        remedy = "; --port 0 takes any free one" if error.errno == errno.EADDRINUSE else ""
        raise ValueError(f"--host {host} --port {port} can't be listened at: {error.strerror}{remedy}") from None
    return bound
