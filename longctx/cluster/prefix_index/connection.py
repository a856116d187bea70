"""`Connection`: the sockets to one publisher of KV events."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.serving.validation import check_text

_LARGEST = 1 << 26  # bytes of a frame; a larger one ends the connection
_WAITING = 1000  # messages that ZeroMQ keeps; if more come, some are missed
_HEARTBEAT = 5_000  # milliseconds
_RECONNECT = 100, 5_000  # milliseconds: at first, and at most


def check_endpoint(name: str, endpoint: object) -> str:
    """Check an address to connect to: "tcp://host:port", or one of `ipc` or `inproc`."""
    text = check_text(name, endpoint)
    expected = f'{name} must be an address such as "tcp://10.0.0.5:5557"'
    try:
        parts = urlsplit(text)
        port = parts.port if parts.scheme == "tcp" else 1
    except ValueError as error:
        raise ValueError(f"{expected}, got {text[:200]!r}: {error}") from error
    is_path = parts.scheme in ("ipc", "inproc") and len(text) > len(parts.scheme) + 3
    is_host = parts.scheme == "tcp" and parts.hostname not in (None, "", "*") and port and not parts.path
    if len(text) > 500 or not text.isprintable() or not (is_path or is_host):
        raise ValueError(f"{expected}, got {text[:200]!r}")
    return text


class Connection:
    """SUB socket, and a DEALER socket for each replay; all belong to one thread.

    Args:
      poller: gets the sockets.
      replay: None: there is none.

    Attributes:
      is_connected: the publisher has accepted the subscriber's connection.
    """

    def __init__(
        self, context: zmq.Context, poller: zmq.Poller, endpoint: str, replay: str | None, topic: bytes
    ) -> None:
        self._context, self._poller, self._replay = context, poller, replay
        self.is_connected = self._was_connected = False
        self._dealer: zmq.Socket | None = None
        self._sub = self._socket(zmq.SUB)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)
        for socket in (self._sub, self._monitor):
            poller.register(socket, zmq.POLLIN)

    @property
    def has_replay(self) -> bool:
        return self._replay is not None

    def ask(self) -> None:
        """Begin a replay of all messages that are kept. Answers to earlier requests come no more."""
        if self._dealer is not None:
            self._drop(self._dealer)
        self._dealer = self._socket(zmq.DEALER)
        self._dealer.connect(self._replay or "")
        self._dealer.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
        self._poller.register(self._dealer, zmq.POLLIN)

    def has_reconnected(self, ready: dict[object, int]) -> bool:
        """Return whether a connection that was lost is there again, by the sockets that are ready."""
        has_reconnected = False
        while self._monitor in ready and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            has_reconnected |= self.is_connected and self._was_connected
            self._was_connected |= self.is_connected
        return has_reconnected

    def live(self, ready: dict[object, int], most: int) -> Iterator[list[bytes]]:
        """Yield messages that have come."""
        if self._sub in ready:
            yield from _received(self._sub, most)

    def replayed(self, ready: dict[object, int], most: int) -> Iterator[list[bytes]]:
        """Yield answers that have come."""
        dealer = self._dealer
        if dealer is not None and dealer in ready:
            for frames in _received(dealer, most):
                yield frames
                if self._dealer is not dealer:
                    return  # something else has been asked for

    def close(self) -> None:
        """Close them; again does nothing."""
        if self._sub.closed:
            return
        self._sub.disable_monitor()
        self._drop(self._monitor)
        self._drop(self._sub)
        if self._dealer is not None:
            self._drop(self._dealer)

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm, socket.maxmsgsize = _WAITING, _LARGEST
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT, 4 * _HEARTBEAT
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT
        return socket

    def _drop(self, socket: zmq.Socket) -> None:
        if socket in self._poller:
            self._poller.unregister(socket)
        socket.close(linger=0)


def _received(socket: zmq.Socket, most: int) -> Iterator[list[bytes]]:
    for _ in range(most):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
