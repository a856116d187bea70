"""`KvEventReader`: keeps an index by the KV events of many instances, in a thread of its own."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from longctx.cluster.prefix_index.connection import Connection, check_endpoint
from longctx.cluster.prefix_index.events import MalformedMessage, decode, update_index
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.serving.validation import check_text

logger = logging.getLogger(__name__)

_MOST_BLOCKS = 100_000_000
_MOST_ERRORS = 5  # malformed messages, after which a publisher is read no more
_MOST_RESTARTS, _RESTARTS_WINDOW = 20, 60.0  # restarts within seconds, after which a publisher is read no more
_MOST_WAITING = 10_000, 1 << 26  # messages, and their bytes, that wait for the end of a replay
_MOST_REPLAYED = 100_000
_MOST_TRIES = 3  # replays after which a missing message is given up
_ROUND = 64  # messages of one publisher before it is another's turn
_POLL = 50  # milliseconds until a call of `add` is noticed, at most
_REPLAY_TIMEOUT = 10.0  # seconds without a message of a replay
_LAST = b"\xff" * 8


class PublisherState(NamedTuple):
    """State of an instance's publisher of KV events.

    Attributes:
      is_connected: its socket has accepted a connection, and has not closed it.
      is_live: it is read as it publishes; False: a replay goes on.
      is_whole: all of its messages are known, from the first on.
      excluded: why it is read no more; "": it is read.
      messages, dropped_events, errors, gaps, restarts: counts. Dropped are events of unknown media.
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
    """Subscribes to instances' events, and keeps an index by them.

    Where messages of an instance were missed, all that it holds is cleared, and what its publisher still keeps is asked
    for. A publisher of malformed messages is counted and, after 5 of them, excluded: its sockets are closed and its
    instance is cleared. The others are read on. An instance whose connection is lost keeps its blocks until the
    connection is there again, or until `remove`.

    Args:
      index: is changed in this reader's thread.
      most_blocks: of one instance, over its tiers; more are malformed.
    """

    def __init__(self, index: PrefixIndex, most_blocks: int = _MOST_BLOCKS) -> None:
        self._index, self._most_blocks = index, most_blocks
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
          instance: its name.
          endpoint: such as "tcp://10.0.0.5:5557".
          replay: where missed messages can be asked for; None: nowhere. Then what it had before is unknown.
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
        """Read an instance no more, and clear what it holds."""
        self._calls.put(lambda: self._remove(instance))

    @property
    def publishers(self) -> dict[str, PublisherState]:
        """State of each publisher, by its instance."""
        return {name: publisher.state for name, publisher in list(self._publishers.items())}

    def close(self) -> None:
        """End the thread; the index stays as it is."""
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
        self._publishers[instance] = _Publisher(instance, connection, self._index, self._most_blocks)

    def _remove(self, instance: str) -> None:
        if (publisher := self._publishers.pop(instance, None)) is not None:
            publisher.close()
            self._index.clear(instance)


class Follower:
    """Order of one publisher's messages, without sockets or clock: the caller brings what comes.

    Messages are numbered from 0. Where a number is missing or goes back, or the connection was lost, all that was said
    is cleared, and all messages that the publisher keeps are asked for. Live messages wait until this replay ends.

    Args:
      apply: takes the payload of the next message.
      clear: forgets all that the publisher has said.
      ask: starts a replay of all messages that are kept, and ends the one before it; None: there is no replay.

    Attributes:
      expected: the number of the next message; None: any.
      is_syncing: a replay goes on.
      is_whole: each message from number 0 on has been applied.
      gaps, restarts: how many there were.
    """

    def __init__(
        self, apply: Callable[[bytes], object], clear: Callable[[], object], ask: Callable[[], object] | None
    ) -> None:
        self._apply, self._clear, self._ask = apply, clear, ask
        self.expected: int | None = None
        self.is_syncing = self.is_whole = False
        self.gaps = self.restarts = 0
        self._last_live = -1
        self._tries = self._num_replayed = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0

    def begin(self) -> None:
        """Clear and ask for everything: at first, and after the connection was lost."""
        self._last_live, self._tries = -1, 0
        self._drop_waiting()
        self._resubscribe()

    def restart(self) -> None:
        """Begin again, as the publisher is another one, or has sent a malformed message."""
        self.restarts += 1
        self.begin()

    def live(self, number: int, payload: bytes) -> None:
        """Take a message that has come as it was published."""
        if number <= self._last_live:
            self.restart()
        self._last_live = number
        messages, size = _MOST_WAITING
        if len(self._waiting) == messages or self._waiting_bytes + len(payload) > size:
            self._drop_waiting()  # they are missed then, and asked for
        self._waiting.append((number, payload))
        self._waiting_bytes += len(payload)
        if not self.is_syncing:
            self._go_on()

    def replayed(self, number: int, payload: bytes) -> None:
        """Take a message of the replay.

        Raises:
          MalformedMessage: the replay has a gap, or no end.
        """
        if not self.is_syncing:
            return
        if self.expected is not None and number != self.expected:
            raise MalformedMessage(f"message {number} is replayed in place of {self.expected}")
        if self._num_replayed == _MOST_REPLAYED:
            raise MalformedMessage(f"more than {_MOST_REPLAYED} messages are replayed")
        self._num_replayed += 1
        self._take(number, payload)

    def replay_ended(self) -> None:
        """Go on with the messages that have waited."""
        if self.is_syncing:
            if self.expected is None:  # nothing has been published
                self.expected, self.is_whole = 0, True
            self._go_on()

    def replay_failed(self) -> None:
        """Ask for the replay again; after 3 times go on without it."""
        if self.is_syncing:
            self._resubscribe()
            if not self.is_syncing:
                self._go_on()

    def _resubscribe(self) -> None:
        self._clear()
        self.expected, self.is_whole, self._num_replayed = None, False, 0
        self.is_syncing = self._ask is not None and self._tries < _MOST_TRIES
        if self._ask is not None and self.is_syncing:
            self._tries += 1
            self._ask()

    def _go_on(self) -> None:
        """Take the messages that wait, up to the first that follows a gap."""
        self.is_syncing = False
        while self._waiting:
            number, payload = self._waiting[0]
            if self.expected is not None and number > self.expected:
                self.gaps += not self._tries
                self._resubscribe()
                if self.is_syncing:
                    return
            self._waiting.popleft()
            self._waiting_bytes -= len(payload)
            if self.expected is None or number == self.expected:  # else the replay had it
                self._take(number, payload)
        self._tries = 0

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _take(self, number: int, payload: bytes) -> None:
        if self.expected is None:
            self.is_whole = number == 0
        self.expected = number + 1
        self._apply(payload)


class _Publisher:
    """One instance's sockets, and what has come of them."""

    def __init__(self, name: str, connection: Connection, index: PrefixIndex, most_blocks: int) -> None:
        self._name, self._connection, self._index, self._most_blocks = name, connection, index, most_blocks
        self._messages = self._dropped = self._errors = 0
        self._excluded = ""
        self._answered = self._window = time.monotonic()
        self._restarts = 0  # before the window
        self._follower = Follower(self._apply, self._clear, self._ask if connection.has_replay else None)
        self._follower.begin()

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
                follower.begin()
            # The replay is read first, as live messages wait for it.
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
                logger.warning("KV events of %s: a replay does not end", self._name)
                follower.replay_failed()
        except MalformedMessage as error:
            self._fail(str(error))
        except Exception as error:  # the others are read on, whatever it is
            logger.exception("KV events of %s", self._name)
            self._exclude(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._connection.close()

    def _check_restarts(self) -> None:
        now, restarts = time.monotonic(), self._follower.restarts
        if now - self._window > _RESTARTS_WINDOW:
            self._window, self._restarts = now, restarts
        elif restarts - self._restarts > _MOST_RESTARTS:
            self._exclude(
                f"its numbers went back {restarts - self._restarts} times within {_RESTARTS_WINDOW:g} seconds"
            )

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

    def _ask(self) -> None:
        self._answered = time.monotonic()
        self._connection.ask()

    def _apply(self, payload: bytes) -> None:
        batch = decode(payload)
        self._dropped += batch.dropped
        update_index(self._index, self._name, batch, self._most_blocks)

    def _clear(self) -> None:
        self._index.clear(self._name)

    def _fail(self, error: str) -> None:
        """Count an error. The changes that the message told of are unknown, so everything is asked for again."""
        self._errors += 1
        logger.warning("KV events of %s: %s", self._name, error)
        if self._errors < _MOST_ERRORS:
            self._follower.restart()
        else:
            self._exclude(error)

    def _exclude(self, error: str) -> None:
        self._excluded = error
        self.close()
        self._clear()
