"""`Follower`: one publisher's messages, in order and without gaps, out of two streams that each may lack some.

Messages come live, and by replay of those that were missed. They are numbered from 0, and begin again with 0 where the
publisher is a new one. That may happen unseen, between two messages with higher numbers. So whoever asks for a replay
asks for the last message known, too: where it is another now, the publisher is another.
"""

from collections import deque
from collections.abc import Callable

import xxhash

from longctx.cluster.prefix_index.events import MalformedMessage

_MOST_WAITING = 10_000, 1 << 26  # messages, and their bytes, that wait for the end of a replay
_MOST_REPLAYED = 100_000
_MOST_TRIES = 3  # replays without what is asked for


class Follower:
    """Applies a publisher's messages in order. No sockets, no clock: the caller brings what comes.

    Args:
      apply: takes the payload of the next message; True: it says all that its publisher has (a snapshot).
      clear: forgets all that the publisher has said.
      ask: starts a replay from a number on, and ends the one before it; None: there is no replay, and where messages
        are missing, all that was said before is forgotten.

    Attributes:
      expected: the number of the next message; None: any.
      is_syncing: a replay goes on.
      is_whole: all that the publisher has is known, not just what it has got lately.
      gaps, restarts: how many there were.
    """

    def __init__(
        self, apply: Callable[[bytes], bool], clear: Callable[[], None], ask: Callable[[int], None] | None
    ) -> None:
        self._apply, self._clear, self._ask = apply, clear, ask
        self.gaps = self.restarts = 0
        self._last_live = -1
        self._forget_all()

    def start(self) -> None:
        """Ask for all that there is; call this once."""
        self._ask_for(0)

    def _forget_all(self) -> None:
        self.expected: int | None = 0 if self._ask else None
        self.is_whole = self.is_syncing = False
        self._is_first_answer = True
        self._has_snapshot = self._has_differed = False
        self._tries = 0
        self._last_digest = 0
        self._replayed: dict[int, int] = {}  # digests of messages that may still come live
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0

    def live(self, number: int, payload: bytes) -> None:
        """A message has come as it was published."""
        if number <= self._last_live:
            self.restart()
        self._last_live = number
        if self.is_syncing:
            self._wait(number, payload)
        else:
            self._next(number, payload)

    def replayed(self, number: int, payload: bytes) -> None:
        """A message of the replay has come.

        Raises:
          MalformedMessage: there is no end of them.
        """
        if not self.is_syncing:
            return
        is_first, self._is_first_answer = self._is_first_answer, False
        if is_first and self.expected and number == self.expected - 1:
            if _digest(payload) != self._last_digest:
                self.restart()
            return
        if number != self.expected:
            # Those that were asked for are kept no more. It may begin with all that its publisher had before them.
            self._clear()
            self.is_whole = False
        if len(self._replayed) == _MOST_REPLAYED:
            raise MalformedMessage(f"more than {_MOST_REPLAYED} messages are replayed")
        self._replayed[number] = _digest(payload)
        is_snapshot = self._take(number, payload)
        self._has_snapshot |= is_first and is_snapshot

    def replay_ended(self) -> None:
        """The replay has ended."""
        if not self.is_syncing:
            return
        if self.expected and self._is_first_answer:
            self.restart()  # not even the last message is there
            return
        if not self.expected:
            self.is_whole = True
        self._go_on()

    def replay_failed(self) -> None:
        """It did not end in time: it is asked for again, and then what was missed is lost."""
        if self.is_syncing and self._tries < _MOST_TRIES:
            self._ask_again()
        elif self.is_syncing:
            self._forget()
            self._go_on()

    def reconnected(self) -> None:
        """Messages may have been missed, and the publisher may be another."""
        if self._ask is None:
            self._forget()
        else:
            self._ask_again()

    def restart(self) -> None:
        """Forget everything, and ask for everything: the publisher is another, or has said what nobody understands."""
        self.restarts += 1
        self._last_live = -1
        self._clear()
        self._forget_all()
        self._ask_for(0)

    def _ask_again(self) -> None:
        self._ask_for(max(0, (self.expected or 0) - 1))

    def _ask_for(self, first: int) -> None:
        if self._ask is not None:
            self.is_syncing = self._is_first_answer = True
            self._has_snapshot = False
            self._tries += 1
            self._ask(first)

    def _go_on(self) -> None:
        self.is_syncing = False
        while self._waiting and not self.is_syncing:
            number, payload = self._waiting.popleft()
            self._waiting_bytes -= len(payload)
            self._next(number, payload)
        if not self._waiting:
            self._tries = 0

    def _next(self, number: int, payload: bytes) -> None:
        if self.expected is not None and number < self.expected:
            # The replay had it already, or a snapshot that came with its number.
            if not self._has_snapshot and self._replayed.get(number, _digest(payload)) != _digest(payload):
                self._begin_again(number, payload)
            return
        if self.expected is not None and number > self.expected:
            if self._tries < _MOST_TRIES and self._ask is not None:
                self.gaps += not self._tries
                self._waiting.appendleft((number, payload))
                self._waiting_bytes += len(payload)
                self._ask_again()
                return
            self.gaps += self._ask is None
            self._forget()
        self._tries = 0
        self._has_differed = False
        self._replayed.clear()
        self._take(number, payload)

    def _begin_again(self, number: int, payload: bytes) -> None:
        """A message is another than the one that was replayed: it is of a new publisher, or of one that lies."""
        if self._has_differed:
            raise MalformedMessage("what is published is not what is replayed")
        self.restart()
        self._has_differed = True
        self._last_live = number
        self._wait(number, payload)

    def _take(self, number: int, payload: bytes) -> bool:
        self.expected, self._last_digest = number + 1, _digest(payload)
        self.is_whole |= number == 0
        is_snapshot = self._apply(payload)
        self.is_whole |= is_snapshot
        return is_snapshot

    def _forget(self) -> None:
        self._clear()
        self.is_whole = False
        self.expected = None

    def _wait(self, number: int, payload: bytes) -> None:
        messages, size = _MOST_WAITING
        if len(self._waiting) == messages or self._waiting_bytes + len(payload) > size:
            self._waiting.clear()  # a replay has them
            self._waiting_bytes = 0
        self._waiting.append((number, payload))
        self._waiting_bytes += len(payload)


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)
