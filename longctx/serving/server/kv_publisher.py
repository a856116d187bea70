"""Publisher of numbered messages to any number of subscribers, with replay of missed ones.

The frames are vLLM's. On the PUB socket: topic, number (8 bytes, big-endian), payload. On the ROUTER socket a request
of a number is answered by all messages from it on that are kept, each as empty frame, topic, number, payload, and by a
last one with the number -1. A subscriber that sees a number go back knows that the publisher is new.

With a secret both sockets are encrypted, and only who knows it can connect (CurveZMQ). Without one they listen on
loopback alone, unless they may be plain: other routers know no CURVE.

The last 10,000 messages are kept. A request of an older one is answered from the oldest that is kept. Replays come one
after another; a reader that takes nothing for two seconds gets no more, and may ask again.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq

from longctx.serving.distributed.network import Key, Network, Socket, pages_key
from longctx.serving.server.settings import is_loopback
from longctx.serving.validation import check_text

logger = logging.getLogger(__name__)

LAST = (-1).to_bytes(8, "big", signed=True)

_KEPT = 10_000  # messages that can be asked for
_SUBSCRIBER = 100_000  # messages that wait for a slow subscriber, who then misses some, and asks for them
_READER = 100  # messages of a replay that ZeroMQ holds for a reader
_TIMEOUT = 2_000  # milliseconds for which a reader may take nothing, while others wait for their replays
_POLL = 100  # milliseconds until the end of the publisher is noticed
_LARGEST = 1 << 12  # bytes of a frame of a subscriber or reader: a larger one ends the connection
_LINGER = 200  # milliseconds for which the last messages may be sent at the end
_Message = tuple[bytes, bytes, bytes]  # topic, number, payload


class KvPublisher:
    """Publisher that sends in a thread of its own, and replays in another. Callers of `publish` never wait.

    Endpoints of this machine, of host `*` or of port `*`, are bound; to another host the publisher connects.

    Args:
      secret: what publisher and subscribers share; None: the sockets are plain.
      is_plain: whether they are plain all the same, also where other machines reach them.

    Attributes:
      endpoint, replay_endpoint: what they are bound to, where a port was `*`.
      is_encrypted: whether subscribers need the secret.

    Raises:
      ValueError: an endpoint can't be used, or needs a secret; the message names it.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None = None,
        topic: str = "",
        secret: str | None = None,
        is_plain: bool = False,
    ) -> None:
        key = None if is_plain else pages_key(secret, "events")
        self.is_encrypted = key is not None
        if not (is_plain or self.is_encrypted):
            check_reach(endpoint, replay)
        self._topic = check_text("kv_events_topic", topic).encode()
        self._queue: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._kept: deque[_Message] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()  # of what is kept
        self._is_closing = threading.Event()
        self._router: Socket | None = None
        self.replay_endpoint: str | None = None
        self._network = Network(_host(endpoint), None)
        try:
            self._socket, self.endpoint = self._open(zmq.PUB, endpoint, "kv_events", key, _SUBSCRIBER)
            if replay is not None:
                self._router, self.replay_endpoint = self._open(zmq.ROUTER, replay, "kv_events_replay", key, _READER)
                self._router.sndtimeo = _TIMEOUT
                self._router.router_mandatory = True  # a reader that is gone is an error, not a message lost
        except BaseException:
            self._network.close()
            raise
        self._threads = [threading.Thread(target=self._send, name="longctx-kv-events", daemon=True)]
        if replay is not None:
            self._threads.append(threading.Thread(target=self._serve_replays, name="longctx-kv-replay", daemon=True))
        for thread in self._threads:
            thread.start()

    def publish(self, encode: Callable[[], bytes]) -> None:
        """Send what `encode` returns, later and in order."""
        self._queue.put(encode)

    def close(self) -> None:
        """Send what is left, and end."""
        if not self._is_closing.is_set():
            self._queue.put(None)
            self._threads[0].join()
            self._is_closing.set()
            for thread in self._threads:
                thread.join()
            for socket in (self._socket, self._router):
                if socket is not None:
                    self._network.drop(socket, _LINGER)
            self._network.close()

    def _open(self, kind: int, endpoint: str, name: str, key: Key | None, limit: int) -> tuple[Socket, str]:
        """Make a socket and bind it, or connect it; return it and its endpoint."""
        connects = kind == zmq.PUB and not _is_bound(endpoint)
        made = self._network.connect(kind, key) if connects else self._network.serve(kind, key)
        made.sndhwm, made.maxmsgsize, made.linger = limit, _LARGEST, _LINGER
        try:
            _check_port(endpoint)
            if connects:
                made.connect(endpoint)
                return made, endpoint
            made.bind(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            raise ValueError(f"{name}={endpoint!r} can't be used: {error}") from error
        return made, made.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]

    def _send(self) -> None:
        number = 0
        while (encode := self._queue.get()) is not None:
            message = self._topic, number.to_bytes(8, "big"), encode()
            with self._lock:
                self._kept.append(message)
            self._socket.send_multipart(message)  # never waits: what a subscriber has no room for is dropped
            number += 1

    def _serve_replays(self) -> None:
        assert self._router is not None
        while not self._is_closing.is_set():
            if not self._router.poll(_POLL, zmq.POLLIN):
                continue
            reader, *frames = self._router.recv_multipart()
            if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
                logger.warning("a request for missed KV events is not an empty frame and 8 bytes: it is ignored")
                continue
            try:
                self._replay(reader, int.from_bytes(frames[1], "big"))
            except zmq.ZMQError as error:  # it has gone, or takes nothing
                logger.info("a reader of missed KV events is given up: %s", error)

    def _replay(self, reader: bytes, first: int) -> None:
        with self._lock:
            messages = list(self._kept)
        assert self._router is not None
        oldest = int.from_bytes(messages[0][1], "big") if messages else 0
        for message in (*messages[max(0, first - oldest) :], (b"", LAST, b"")):
            self._router.send_multipart([reader, b"", *message])
            if self._is_closing.is_set():
                return


def _check_port(endpoint: str) -> None:
    """Raise ValueError for a port that ZeroMQ would take for another one."""
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp:") and port.isdecimal() and int(port) > 65535:
        raise ValueError(f"there is no port {port}")


def check_reach(*endpoints: str | None) -> None:
    """Raise ValueError if other machines may reach an endpoint, or an endpoint is of another machine; None: none is."""
    for endpoint in endpoints:
        host = _host(endpoint or "ipc://")
        if host and not is_loopback(host):
            raise ValueError(
                f"kv_events at {endpoint} may be reached from other machines: they need a secret that their readers "
                "share, --kv-secret-file, or --kv-events-plain where only readers reach them"
            )


def _host(endpoint: str) -> str:
    """Return the host of an endpoint, an IPv6 address without brackets; "": it is of no network."""
    parts = urlsplit(endpoint)
    return parts.netloc.rpartition(":")[0].strip("[]") if parts.scheme == "tcp" else ""


def _is_bound(endpoint: str) -> bool:
    """Return whether an endpoint is one of this machine, to which subscribers connect."""
    host = _host(endpoint)
    return host in ("", "*", "0.0.0.0", "::") or is_loopback(host) or endpoint.endswith(":*")
