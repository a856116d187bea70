"""HTTP server under the app: uvicorn, with TLS, limits on connections and headers, and a shutdown that takes its time.

It accepts connections itself, so that they count from then on, and handshakes use the certificates of the time.
"""

import asyncio
import contextlib
import errno
import functools
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

from longctx.serving.server.app import make_app, probes_only
from longctx.serving.server.connections import Connection, Connections, most_connections
from longctx.serving.server.errors import ApiError
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.server import Server
from longctx.serving.server.settings import SAME_SIGNAL
from longctx.serving.server.tls import Tls

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_ANSWERS = 2  # seconds for what clients have not taken yet, at the very end
_POLL = 0.05
_SEND_BUFFER = 128 * 2**10  # bytes of a connection in the system: a client that takes nothing is noticed soon
_BACKLOG, _KEEP_ALIVE = 2048, 75
_ACCEPTED = 16  # connections at a time
_ACCEPT_AGAIN = 0.1  # seconds until more are accepted where descriptors have run out
_FIRST_LOOK, _LAST_LOOK = 0.002, 1.0  # seconds between looks at whether a client that sends nothing more is there


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on headers and on clients that do not read.

    They are on the size of headers and the time until they are there, and on how long a client may take nothing of what
    is sent to it.

    A client that sends nothing more (a half-closed connection) still gets the answer to a complete request. One that
    has left looks the same. So it is sent something that means nothing: the system of one that has left resets the
    connection then.
    """

    server_of: "HttpServer"
    connection: Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.settings, self.connection.close = self.server_of.server.settings, transport.abort
        self._is_half_closed = False
        refusal = self.connection.refusal or self.server_of.certificate_refusal(transport)
        if refusal is not None:
            self.app = probes_only(self.app, self.server_of.server, refusal)
        self._header_bytes = 0
        self._is_too_large = False
        self._late: TimerHandle | None = None
        self._stuck: TimerHandle | None = None
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        self.resume_writing()
        self.server_of.connections.remove(self.connection)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        cycle = self.cycle
        is_waiting = cycle is not None and not cycle.response_complete and not self.pipeline and not cycle.more_body
        if not is_waiting or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return False  # it is closed
        self._is_half_closed = True
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.chunked_encoding:
            self.transport.write(b"1\r\n\n\r\n")  # an empty line, which ends no event
        self.loop.call_later(_FIRST_LOOK, self._look_for_client, _FIRST_LOOK)
        return True

    def _look_for_client(self, seconds: float) -> None:
        """Close the connection of a client that has left, which the event loop no longer notices by itself."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        seconds = min(4 * seconds, _LAST_LOOK)
        self.loop.call_later(seconds, self._look_for_client, seconds)

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
        self.server_of.connections.begin(self.connection)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self.server_of.connections.end(self.connection)
            if self._is_half_closed:
                self.transport.close()
        super().on_response_complete()

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

    Args:
      app: of the server; None: that of an engine's.
      tls: None: it speaks plain HTTP. After SIGHUP it is loaded again, as the server's keys are.
      needs_certificate: whether requests other than probes need a certificate of the client, where `tls` has a CA.

    Attributes:
      loop: that serves, once it runs.
      connections: that are open.
    """

    loop: asyncio.AbstractEventLoop
    connections: Connections

    def __init__(
        self, server: Frontend, app: ASGIApp | None = None, tls: Tls | None = None, needs_certificate: bool = True
    ) -> None:
        if app is None:
            assert isinstance(server, Server), "only an engine's server has an app by itself"
            app = make_app(server)
        config = uvicorn.Config(
            app,
            http=type("Protocol", (LimitedProtocol,), {"server_of": self}),
            ws="none",
            loop="uvloop",
            log_config=None,
            log_level="error",  # warnings are of what clients send: any of them could fill the log
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_ANSWERS,
        )
        super().__init__(config)
        self.server, self.tls = server, tls
        self._needs_certificate = needs_certificate and tls is not None and tls.has_ca
        self._accepting: dict[asyncio.Task[None], Connection] = {}
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
        reload = lambda number, frame: self.loop.call_soon_threadsafe(self.reload)  # noqa: E731
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, reload)
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
        elif now - self._signalled > SAME_SIGNAL:
            os.write(2, b"longctx: ended by a second signal\n")
            os._exit(128 + sig)

    def reload(self) -> None:
        """Read keys and certificates again, these for connections from now on; call it in the event loop."""
        self.server.keys.reload()
        if self.tls is None:
            return
        try:
            self.tls.load()
        except ValueError as error:
            logger.error("longctx: the certificates stay as they were: %s", error)
        else:
            logger.info("longctx: the certificates are read again")

    # Connections.

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        settings = self.server.settings
        most = most_connections(settings.max_connections)
        by_address = settings.max_connections_by_address or (most + 1) // 2
        self.connections = Connections(most, by_address)
        if self.tls is not None:
            self.reload()  # it may have taken long until now
        for listener in sockets or ():
            listener.setblocking(False)
            listener.listen(_BACKLOG)  # before `started` is set, after which no client is to be refused
        await super().startup(sockets=[])
        for listener in sockets or ():
            self.loop.add_reader(listener, self._accept, listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            self.loop.remove_reader(listener)
        for connection in self._accepting.values():
            connection.close()
        await super().shutdown(sockets)

    def certificate_refusal(self, transport: asyncio.Transport) -> ApiError | None:
        """Return the answer to requests without a certificate; None: they need none, or have one."""
        if not self._needs_certificate or transport.get_extra_info("peercert"):
            return None
        return ApiError(403, "a certificate of the cluster's CA is needed (--tls-ca)", code="certificate_needed")

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED):
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # descriptors have run out: the others that wait stay in the backlog
                self.connections.close_idle()
                self.loop.remove_reader(listener)
                self.loop.call_later(_ACCEPT_AGAIN, self._accept_again, listener)
                return
            connection = self.connections.admit(address[0])
            connection.close = functools.partial(_hang_up, accepted)
            task = self.loop.create_task(self._connect(accepted, connection))
            self._accepting[task] = connection
            task.add_done_callback(self._accepting.pop)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self.should_exit:
            self.loop.add_reader(listener, self._accept, listener)

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        """Make the protocol of a connection, after the handshake of TLS."""
        accepted.setblocking(False)
        protocol: LimitedProtocol = self.config.http_protocol_class(  # type: ignore[assignment, call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=self.loop
        )
        protocol.connection = connection
        tls = None if self.tls is None else self.tls.server
        timeout = None if tls is None else self.server.settings.header_timeout
        try:
            await self.loop.connect_accepted_socket(lambda: protocol, accepted, ssl=tls, ssl_handshake_timeout=timeout)
        except OSError as error:  # ssl.SSLError is one
            logger.debug("longctx: a handshake failed: %s", error)
        finally:
            if protocol.transport is None:  # it was never made
                self.connections.remove(connection)

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


def _hang_up(accepted: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was first
        accepted.shutdown(socket.SHUT_RDWR)


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
