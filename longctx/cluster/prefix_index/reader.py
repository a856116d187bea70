"""`KvEventReader`: reads the KV events of many instances, from a thread of its own."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import zmq

from longctx.cluster.prefix_index.connection import Connection, check_endpoint
from longctx.cluster.prefix_index.events import MalformedMessage, decode
from longctx.cluster.prefix_index.follower import Follower
from longctx.cluster.prefix_index.listeners import KvEventListener
from longctx.serving.validation import check_text

logger = logging.getLogger(__name__)

_MOST_ERRORS = 5  # malformed messages, after which a publisher is read no more
_MOST_RESTARTS, _RESTARTS_WINDOW = 20, 60.0  # so many within so many seconds: what it says is worth nothing
_ROUND = 64  # messages of one publisher before it is another's turn
_POLL = 50  # milliseconds until a call of `add` is noticed, at most
_REPLAY_TIMEOUT = 10.0  # seconds without a message of a replay
_LAST = b"\xff" * 8


class PublisherState(NamedTuple):
    """What is known of an instance's publisher of KV events.

    Attributes:
      is_connected: its socket has accepted a connection, and has not closed it.
      is_live: all that it has published is known up to now; False: a replay goes on.
      is_whole: also what it had before this reader came.
      excluded: why it is read no more; "": it is read.
      messages, dropped_events, errors, gaps, restarts: how many there were. Dropped are events of unknown media.
    """

    is_connected: bool
    is_live: bool
    is_whole: bool
    excluded: str
    messages: int
    dropped_events: int
    errors: int
    gaps: int
    restarts: int


class KvEventReader:
    """Subscribes to instances' events, asks for those that were missed, and tells listeners of them in order.

    Whoever sends nonsense is counted and, after a few times, excluded: its sockets are closed, and listeners are told
    that nothing is known of it. The others are read on. An instance whose connection is lost keeps what it has: whether
    it is dead is for others to say, by `remove`.

    Args:
      listeners: are called in this reader's thread, in order.
    """

    def __init__(self, *listeners: KvEventListener) -> None:
        self._listeners = listeners
        self._context = zmq.Context()
        self._publishers: dict[str, _Publisher] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closing = False
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="longctx-kv-reader", daemon=True)
        self._thread.start()

    def add(self, instance: str, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        """Read an instance's events from now on; if it is read already, from the beginning.

        Args:
          endpoint: such as "tcp://10.0.0.5:5557". replay: where missed messages can be asked for; None: nowhere. Then
            what it had before is unknown, and if a message is lost, all that it has.
          topic: only messages whose first frame begins with it.

        Raises:
          TypeError, ValueError: an argument is wrong.
        """
        check_text("instance", instance)
        check_endpoint("endpoint", endpoint)
        if replay is not None:
            check_endpoint("replay", replay)
        prefix = check_text("topic", topic).encode()
        self._calls.put(lambda: self._add(instance, endpoint, replay, prefix))

    def remove(self, instance: str) -> None:
        """Read an instance no more, and forget what it has."""
        self._calls.put(lambda: self._remove(instance))

    @property
    def publishers(self) -> dict[str, PublisherState]:
        """By instance."""
        return {name: publisher.state for name, publisher in list(self._publishers.items())}

    def close(self) -> None:
        """End its thread; listeners keep what they know."""
        self._is_closing = True
        self._thread.join()

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                ready = dict(self._poller.poll(_POLL))
                while not self._calls.empty():
                    self._calls.get()()
                for publisher in list(self._publishers.values()):
                    publisher.read(ready)
        finally:
            for publisher in self._publishers.values():
                publisher.close()
            self._context.destroy(linger=0)

    def _add(self, instance: str, endpoint: str, replay: str | None, topic: bytes) -> None:
        self._remove(instance)
        try:
            connection = Connection(self._context, self._poller, endpoint, replay, topic)
        except zmq.ZMQError as error:
            logger.warning("KV events of %s can't be read: %s", instance, error)
            return
        self._publishers[instance] = _Publisher(instance, connection, self._listeners)

    def _remove(self, instance: str) -> None:
        if (publisher := self._publishers.pop(instance, None)) is not None:
            publisher.close()
            publisher.clear()


class _Publisher:
    """One instance's sockets, and what has come of them."""

    def __init__(self, name: str, connection: Connection, listeners: Iterable[KvEventListener]) -> None:
        self._name, self._connection, self._listeners = name, connection, list(listeners)
        self._messages = self._dropped = self._errors = 0
        self._excluded = ""
        self._answered = self._window = time.monotonic()
        self._restarts = 0  # before the window
        self._follower = Follower(self._apply, self.clear, self._ask if connection.has_replay else None)
        self._follower.start()

    @property
    def state(self) -> PublisherState:
        follower, connection = self._follower, self._connection
        is_live = connection.is_connected and not follower.is_syncing and not self._excluded
        counts = self._messages, self._dropped, self._errors, follower.gaps, follower.restarts
        return PublisherState(connection.is_connected, is_live, is_live and follower.is_whole, self._excluded, *counts)

    def read(self, ready: dict[object, int]) -> None:
        """Read some of what has come."""
        if self._excluded:
            return
        connection, follower = self._connection, self._follower
        try:
            if connection.has_reconnected(ready):
                follower.reconnected()
            # What is missed is asked for first: what is live waits for it.
            for frames in connection.replayed(ready, _ROUND):
                self._answered = time.monotonic()
                self._replayed(frames)
            for frames in connection.live(ready, _ROUND):
                self._live(frames)
            self._check_restarts()
            if not connection.is_connected:
                self._answered = time.monotonic()  # it may not have started yet
            if follower.is_syncing and time.monotonic() - self._answered > _REPLAY_TIMEOUT:
                self._answered = time.monotonic()
                logger.warning("KV events of %s: a replay does not end; what was missed is forgotten", self._name)
                follower.replay_failed()
        except MalformedMessage as error:
            self._fail(str(error))
        except Exception as error:  # the others are read on, whatever it is
            logger.exception("KV events of %s", self._name)
            self._exclude(f"{type(error).__name__}: {error}")

    def _check_restarts(self) -> None:
        now, restarts = time.monotonic(), self._follower.restarts
        if now - self._window > _RESTARTS_WINDOW:
            self._window, self._restarts = now, restarts
        elif restarts - self._restarts > _MOST_RESTARTS:
            self._exclude(
                f"its numbers went back {restarts - self._restarts} times within {_RESTARTS_WINDOW:g} seconds"
            )

    def clear(self) -> None:
        """Nothing is known of it."""
        for listener in self._listeners:
            listener.clear(self._name)

    def close(self) -> None:
        self._connection.close()

    def _live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8 or frames[1] == _LAST:
            raise MalformedMessage("a message is not a topic, a number of 8 bytes and a payload")
        self._messages += 1
        self._follower.live(int.from_bytes(frames[1], "big"), frames[2])

    def _replayed(self, frames: list[bytes]) -> None:
        # An empty frame, a topic (since 2026; before there was none), a number and a payload.
        if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != 8:
            raise MalformedMessage("an answer is not an empty frame, a topic, a number of 8 bytes and a payload")
        if frames[-2] == _LAST:
            self._follower.replay_ended()
        else:
            self._messages += 1
            self._follower.replayed(int.from_bytes(frames[-2], "big"), frames[-1])

    def _ask(self, first: int) -> None:
        self._answered = time.monotonic()
        self._connection.ask(first)

    def _apply(self, payload: bytes) -> bool:
        batch = decode(payload)
        self._dropped += batch.dropped
        for listener in self._listeners:
            listener.take(self._name, batch, payload)
        return batch.is_snapshot

    def _fail(self, error: str) -> None:
        """Count an error. What the message said is unknown, so all is asked for again."""
        self._errors += 1
        logger.warning("KV events of %s: %s", self._name, error)
        if self._errors < _MOST_ERRORS:
            self._follower.restart()
        else:
            self._exclude(error)

    def _exclude(self, error: str) -> None:
        self._excluded = error
        self.close()
        self.clear()
