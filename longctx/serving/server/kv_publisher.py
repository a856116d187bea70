"""Publisher of numbered messages to any number of subscribers, with replay of missed ones.

The frames are vLLM's. On the PUB socket: topic, number (8 bytes, big-endian), payload. On the ROUTER socket a request
of a number is answered by all messages from it on that are kept, each as empty frame, topic, number, payload, and by a
last one with the number -1. A subscriber that sees a number go back knows that the publisher is new.

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

from longctx.serving.validation import check_text

logger = logging.getLogger(__name__)

LAST = (-1).to_bytes(8, "big", signed=True)

_KEPT = 10_000  # messages that can be asked for
_SUBSCRIBER = 100_000  # messages that wait for a slow subscriber, who then misses some, and asks for them
_READER = 100  # messages of a replay that ZeroMQ holds for a reader
_TIMEOUT = 2_000  # milliseconds for which a reader may take nothing, while others wait for their replays
_POLL = 100  # milliseconds until the end of the publisher is noticed
_HEARTBEAT = 5_000  # milliseconds; a reader that is gone is forgotten after some
_LINGER = 200  # milliseconds for which the last messages may be sent at the end
_Message = tuple[bytes, bytes, bytes]  # topic, number, payload


class KvPublisher:
    """Publisher that sends from a thread of its own and replays from another: callers of `publish` never wait.

    Endpoints of this machine, or of `*`, are bound; to another host the publisher connects.

    Attributes:
      endpoint, replay_endpoint: what they are bound to, where a port was `*`.
    """

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        self._topic = check_text("kv_events_topic", topic).encode()
        self._queue: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._kept: deque[_Message] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()  # of what is kept
        self._is_closing = threading.Event()
        self._context = zmq.Context()
        self._socket, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(_SUBSCRIBER)
        self._router.sndhwm, self._router.sndtimeo = _READER, _TIMEOUT
        self._router.router_mandatory = True  # a reader that is gone is an error, not a message lost
        self._router.heartbeat_ivl, self._router.heartbeat_timeout = _HEARTBEAT, 4 * _HEARTBEAT
        self._socket.linger = self._router.linger = _LINGER
        try:
            self.endpoint = _open(self._socket, endpoint, "kv_events", may_connect=True)
            self.replay_endpoint = None if replay is None else _open(self._router, replay, "kv_events_replay")
        except BaseException:
            self._context.destroy(linger=0)
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
            self._socket.close()
            self._router.close()
            self._context.term()

    def _send(self) -> None:
        number = 0
        while (encode := self._queue.get()) is not None:
            message = self._topic, number.to_bytes(8, "big"), encode()
            with self._lock:
                self._kept.append(message)
            self._socket.send_multipart(message)  # never waits: what a subscriber has no room for is dropped
            number += 1

    def _serve_replays(self) -> None:
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
        oldest = int.from_bytes(messages[0][1], "big") if messages else 0
        for message in (*messages[max(0, first - oldest) :], (b"", LAST, b"")):
            self._router.send_multipart([reader, b"", *message])
            if self._is_closing.is_set():
                return


def _open(socket: zmq.Socket[bytes], endpoint: str, name: str, may_connect: bool = False) -> str:
    """Bind a socket, or connect it; return its endpoint."""
    try:
        _check_port(endpoint)
        if may_connect and not _is_bound(endpoint):
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except (zmq.ZMQError, ValueError) as error:
        raise ValueError(f"{name}={endpoint!r} can't be used: {error}") from error
    return socket.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]


def _check_port(endpoint: str) -> None:
    """Raise ValueError for a port that ZeroMQ would take for another one."""
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp:") and port.isdecimal() and int(port) > 65535:
        raise ValueError(f"there is no port {port}")


def _is_bound(endpoint: str) -> bool:
    """Return whether an address is one of this machine, to which subscribers connect."""
    parts = urlsplit(endpoint)
    host = parts.netloc.rpartition(":")[0].strip("[]")
    return parts.scheme != "tcp" or host in ("*", "localhost", "0.0.0.0", "::", "::1") or host.startswith("127.")


def is_public(endpoint: str) -> bool:
    """Return whether other machines may connect to an address that is bound."""
    host = urlsplit(endpoint).netloc.rpartition(":")[0].strip("[]")
    return host in ("*", "0.0.0.0", "::")
