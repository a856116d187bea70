"""Counts what comes from strangers: who is not of the group, or speaks another protocol."""

import logging
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.serving.distributed.network import Socket

_LOG = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 1.0


class Strangers:
    """A count of connections and messages that were dropped, and a log of them with at most one line a second.

    Args:
      name: what they came to, in the log.

    Attributes:
      count: how many there were.
    """

    def __init__(self, name: str) -> None:
        self._name, self.count, self._logged = name, 0, 0
        self._next_line = 0.0
        self._notes: list[str] = []
        self._monitors: list[_HandshakeMonitor] = []

    def monitor(self, socket: Socket) -> None:
        """Count connections to a socket that close before their handshake is complete."""
        self._monitors.append(_HandshakeMonitor(socket))

    def add(self, note: str = "") -> None:
        """Count one more; `note` says something about it in the next line of the log."""
        self.count += 1
        if note:
            self._notes = [note]

    def update(self) -> None:
        """Count what the monitors have seen, and log it."""
        self.count += sum(monitor.read() for monitor in self._monitors)
        if self.count == self._logged or time.monotonic() < self._next_line:
            return
        new, self._logged = self.count - self._logged, self.count
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        what = "".join(f"; {note}" for note in self._notes)
        _LOG.warning(
            "longctx: %s dropped %d connections or messages of strangers, %d so far%s",
            self._name,
            new,
            self.count,
            what,
        )
        self._notes = []


class _HandshakeMonitor:
    """Compares the numbers of accepted connections and of complete handshakes whenever a connection closes."""

    def __init__(self, socket: Socket) -> None:
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._socket = socket.get_monitor_socket(events)
        self._num_open = 0  # connections whose handshake is not complete

    def read(self) -> int:
        """How many strangers there were since the last call."""
        found = 0
        while self._socket.poll(0):
            event = recv_monitor_message(self._socket)["event"]
            if event == zmq.EVENT_ACCEPTED:
                self._num_open += 1
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_open -= 1
            elif self._num_open > 0:  # otherwise a member of the group closed its connection
                self._num_open -= 1
                found += 1
        return found
