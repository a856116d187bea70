"""`KvEventReader`: keeps an index by the KV events of many instances, each in a thread of its own."""

import contextlib
import logging
import threading
import time
from collections import deque
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.cluster.prefix_index.events import MalformedMessage, decode, update_index
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.serving.distributed.network import Key, Network, Socket, pages_key
from longctx.serving.validation import check_text

logger = logging.getLogger(__name__)

_MOST_BLOCKS = 100_000_000
_MOST_ERRORS = 5  # malformed messages, after which a publisher is read no more
_MOST_RESTARTS, _RESTARTS_WINDOW = 20, 60.0  # restarts within seconds, after which a publisher is read no more
_MOST_REPLAYED = 100_000
_MOST_TRIES = 3  # replays after which a missing message is given up
_ROUND = 64  # messages that are read before it is seen whether the connection is there
_PAUSE = 0.01  # seconds after live messages: others gather meanwhile, as each that is waited for costs a wake-up
_POLL = 500  # milliseconds until a call of `remove` is noticed, at most
_REPLAY_TIMEOUT = 10.0  # seconds without a message of a replay
_LARGEST = 1 << 26  # bytes of a frame; a larger one ends the connection
_WAITING = 10_000  # messages that ZeroMQ keeps; if more come, some are missed
_RECONNECT = 100, 5_000  # milliseconds: at first, and at most
_LAST = b"\xff" * 8


class PublisherState(NamedTuple):
    """State of an instance's publisher of KV events.

    Attributes:
      is_connected: its socket has accepted a connection, and has not closed it.
      is_live: it is read as it publishes; False: a replay goes on.
      is_whole: all of its messages are known, from the first on.
      excluded: why it is read no more; "": it is read.
      messages, errors, gaps, restarts: counts.
    """

    is_connected: bool
    is_live: bool
    is_whole: bool
    excluded: str
    messages: int
    errors: int
    gaps: int
    restarts: int


class KvEventReader:
    """Subscribes to instances' events, and keeps an index by them.

    Where messages of an instance were missed, all that it holds is cleared, and what its publisher still keeps is asked
    for. A publisher of malformed messages is counted and, after 5 of them, excluded: its sockets are closed and its
    instance is cleared. The others are read on. An instance whose connection is lost keeps its blocks until the
    connection is there again, or until `remove`.

    Args:
      index: is changed in this reader's threads.
      most_blocks: of one instance, over its tiers; more are malformed.
      secret: what instances share, by which events that are encrypted are read; None: there is none.

    Raises:
      TypeError, ValueError: the secret is no text, or one that could be guessed.
    """

    def __init__(self, index: PrefixIndex, most_blocks: int = _MOST_BLOCKS, secret: str | None = None) -> None:
        self._index, self._most_blocks, self._key = index, most_blocks, pages_key(secret, "events")
        self._network = Network("127.0.0.1", None)
        self._publishers: dict[str, _Publisher] = {}
        self._ending: dict[str, _Publisher] = {}

    def add(
        self, instance: str, endpoint: str, replay: str | None = None, topic: str = "", is_encrypted: bool = False
    ) -> None:
        """Read an instance's events from now on; if it is read already, from the beginning.

        Args:
          instance: its name.
          endpoint: such as "tcp://10.0.0.5:5557".
          replay: where missed messages can be asked for; None: nowhere. Then what it had before is unknown.
          topic: only messages whose first frame begins with it.
          is_encrypted: whether its publisher has the secret.

        Raises:
          TypeError, ValueError: an argument is wrong.
        """
        check_text("instance", instance)
        check_endpoint("endpoint", endpoint)
        if replay is not None:
            check_endpoint("replay", replay)
        prefix = check_text("topic", topic).encode()
        if is_encrypted and self._key is None:
            raise ValueError("is_encrypted needs the secret of the reader")
        self.remove(instance)
        before = self._ending.get(instance)
        key, limit = self._key if is_encrypted else None, self._most_blocks
        publisher = _Publisher(instance, endpoint, replay, prefix, self._network, key, self._index, limit, before)
        self._publishers[instance] = publisher
        publisher.start()

    def remove(self, instance: str) -> None:
        """Read an instance no more, and clear what it holds."""
        if (publisher := self._publishers.pop(instance, None)) is not None:
            publisher.is_closing = True
            self._ending[instance] = publisher

    @property
    def publishers(self) -> dict[str, PublisherState]:
        """State of each publisher, by its instance."""
        return {name: publisher.state for name, publisher in list(self._publishers.items())}

    def close(self) -> None:
        """End all threads, and clear the index."""
        for name in list(self._publishers):
            self.remove(name)
        for publisher in self._ending.values():
            publisher.join()
        self._network.close()


class _Publisher(threading.Thread):
    """Thread that reads one instance's events in order.

    Messages are numbered from 0. Where a number is missing or goes back, or the connection was lost, all that was said
    is cleared, and all messages that the publisher keeps are asked for. Live messages wait until this replay ends.

    Args:
      key: of the publisher's sockets; None: they are plain.
      before: reads the same instance, and is about to end.

    Attributes:
      is_closing: set by others, to end it.
      excluded: why it has ended by itself.
    """

    def __init__(
        self,
        instance: str,
        endpoint: str,
        replay: str | None,
        topic: bytes,
        network: Network,
        key: Key | None,
        index: PrefixIndex,
        most_blocks: int,
        before: "_Publisher | None",
    ) -> None:
        super().__init__(name=f"longctx-kv-reader {instance}", daemon=True)
        self._instance, self._endpoint, self._replay, self._topic = instance, endpoint, replay, topic
        self._network, self._key = network, key
        self._index, self._most_blocks, self._before = index, most_blocks, before
        self.is_closing = self._is_connected = self._is_whole = False
        self.excluded = ""
        self._messages = self._errors = self._gaps = self._num_restarts = 0
        self._restarts: deque[float] = deque(maxlen=_MOST_RESTARTS + 1)  # when the last ones were
        self._sub, self._dealer = self._socket(zmq.SUB), self._socket(zmq.DEALER)
        self._source: Socket | None = None  # that is read: the replay's, then the live one; None: none yet
        self._expected: int | None = None  # the number of the next message; None: any
        self._pending: tuple[int, bytes] | None = None  # a live message that follows a gap
        self._last_live, self._tries, self._num_replayed, self._answered = -1, 0, 0, 0.0

    @property
    def state(self) -> PublisherState:
        is_live = self._is_connected and self._source is self._sub and not self.excluded
        counts = self._messages, self._errors, self._gaps, self._num_restarts
        return PublisherState(self._is_connected, is_live, is_live and self._is_whole, self.excluded, *counts)

    def run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._sub.subscribe(self._topic)
            self._sub.connect(self._endpoint)
            while not (self.is_closing or self.excluded):
                try:
                    self._step(monitor)
                except MalformedMessage as error:
                    self._fail(str(error))
        except Exception as error:  # the others are read on, whatever it is
            logger.exception("KV events of %s", self._instance)
            self.excluded = f"{type(error).__name__}: {error}"
        finally:
            for socket in (self._sub, self._dealer):
                self._network.drop(socket)
            monitor.close(linger=0)
            self._index.clear(self._instance)

    def _step(self, monitor: Socket) -> None:
        """Read some of what has come."""
        source, poller = self._source, zmq.Poller()
        for socket in (monitor, source):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(_POLL))
        if monitor in ready:
            self._is_connected = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                self._begin()
        elif source in ready:
            for _ in range(_ROUND):
                try:
                    frames = source.recv_multipart(zmq.NOBLOCK)  # type: ignore[union-attr]
                except zmq.Again:
                    if source is self._sub:
                        time.sleep(_PAUSE)
                    return
                self._read_live(frames) if source is self._sub else self._read_replayed(frames)
                if self._source is not source:
                    return
        elif not self._is_connected:
            self._answered = time.monotonic()
        elif source is self._dealer and time.monotonic() - self._answered > _REPLAY_TIMEOUT:
            logger.warning("KV events of %s: a replay does not end", self._instance)
            self._resync()

    def _begin(self) -> None:
        """Forget what was said, and ask for everything: over a new connection, or after a malformed message."""
        self._last_live, self._tries, self._pending = -1, 0, None
        if self._replay is not None:  # which has what waits, too; another publisher may have sent it
            with contextlib.suppress(zmq.Again):
                while True:
                    self._sub.recv_multipart(zmq.NOBLOCK)
        self._resync()

    def _resync(self) -> None:
        """Forget what was said, and ask for all that is kept; not after 3 times: then go on with what comes."""
        self._index.clear(self._instance)
        self._expected, self._is_whole, self._num_replayed = None, False, 0
        if self._replay is None or self._tries == _MOST_TRIES:
            self._go_live()
            return
        self._tries += 1
        self._network.drop(self._dealer)  # answers to an earlier request come no more
        self._dealer = self._source = self._socket(zmq.DEALER)
        self._dealer.connect(self._replay)
        self._dealer.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
        self._answered = time.monotonic()

    def _go_live(self) -> None:
        self._source = self._sub
        self._take_pending()

    def _read_replayed(self, frames: list[bytes]) -> None:
        if len(frames) != 4 or frames[0] or len(frames[2]) != 8:
            raise MalformedMessage("an answer is not an empty frame, a topic, a number of 8 bytes and a payload")
        self._answered = time.monotonic()
        if frames[2] == _LAST:
            if self._expected is None:  # nothing has been published
                self._expected, self._is_whole = 0, True
            self._go_live()
            return
        number = int.from_bytes(frames[2], "big")
        if self._expected is not None and number != self._expected:
            raise MalformedMessage(f"message {number} is replayed in place of {self._expected}")
        if self._num_replayed == _MOST_REPLAYED:
            raise MalformedMessage(f"more than {_MOST_REPLAYED} messages are replayed")
        self._num_replayed += 1
        self._take(number, frames[3])

    def _read_live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8 or frames[1] == _LAST:
            raise MalformedMessage("a message is not a topic, a number of 8 bytes and a payload")
        number = int.from_bytes(frames[1], "big")
        goes_back, self._last_live = number <= self._last_live, number
        self._pending = number, frames[2]
        if goes_back:  # the publisher is another one
            self._note_restart()
            self._tries = 0
            self._resync()
        else:
            self._take_pending()

    def _take_pending(self) -> None:
        """Take the live message that waits, unless it follows a gap."""
        if self._pending is None:
            self._tries = 0
            return
        number, payload = self._pending
        if self._expected is not None and number > self._expected:
            self._gaps += not self._tries
            self._resync()
            return
        self._pending, self._tries = None, 0
        if self._expected is None or number == self._expected:  # else the replay had it
            self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        self._messages += 1
        if self._expected is None:
            self._is_whole = number == 0
        self._expected = number + 1
        update_index(self._index, self._instance, decode(payload), self._most_blocks)

    def _note_restart(self) -> None:
        self._num_restarts += 1
        self._restarts.append(time.monotonic())
        if len(self._restarts) > _MOST_RESTARTS and self._restarts[-1] - self._restarts[0] < _RESTARTS_WINDOW:
            self.excluded = f"its numbers went back {_MOST_RESTARTS} times within {_RESTARTS_WINDOW:g} seconds"

    def _fail(self, error: str) -> None:
        """Count an error. The changes that the message told of are unknown, so everything is asked for again."""
        self._errors += 1
        logger.warning("KV events of %s: %s", self._instance, error)
        if self._errors == _MOST_ERRORS:
            self.excluded = error
        else:
            self._num_restarts += 1
            self._begin()

    def _socket(self, kind: int) -> Socket:
        socket = self._network.connect(kind, self._key)
        socket.linger, socket.ipv6 = 0, "[" in self._endpoint
        socket.rcvhwm, socket.maxmsgsize = _WAITING, _LARGEST
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT
        return socket


def check_endpoint(name: str, endpoint: object) -> None:
    """Check an address to connect to: "tcp://host:port", or one of `ipc`."""
    text = check_text(name, endpoint)
    expected = f'{name} must be an address such as "tcp://10.0.0.5:5557"'
    try:
        parts = urlsplit(text)
        port = parts.port if parts.scheme == "tcp" else 1
    except ValueError as error:
        raise ValueError(f"{expected}, got {text[:200]!r}: {error}") from error
    is_path = parts.scheme == "ipc" and len(text) > len("ipc://")
    is_host = parts.scheme == "tcp" and parts.hostname not in (None, "", "*") and port and not parts.path
    if len(text) > 500 or not text.isprintable() or not (is_path or is_host):
        raise ValueError(f"{expected}, got {text[:200]!r}")
