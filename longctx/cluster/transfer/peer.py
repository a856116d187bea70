"""`Peer`: the connection of a receiver of pages to a sender."""

import logging
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.cluster.transfer.fetch_state import Stream
from longctx.cluster.transfer.messages import FromReceiver, encode
from longctx.cluster.transfer.stats import Outcome
from longctx.serving.distributed.network import Network, Socket

_LOG = logging.getLogger(__name__)
_LOSSES = zmq.EVENT_DISCONNECTED
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class NoRoom(Exception):
    """There are as many connections as there may be, and none is idle."""


class Peer:
    """A connection to a sender."""

    def __init__(self, network: Network, key: Any, address: str, max_bytes: int) -> None:
        self.address, self.network = address, network
        self.streams: dict[int, Stream] = {}
        self.used = time.monotonic()
        self._has_failed = False
        self.socket: Socket = network.connect(zmq.DEALER, key)
        try:
            self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            self.socket.setsockopt(zmq.IPV6, int("[" in address))
            self.monitor = self.socket.get_monitor_socket(_LOSSES | _REFUSALS)
            self.socket.connect(f"tcp://{address}")
        except Exception:
            network.drop(self.socket)
            raise

    def send(self, message: FromReceiver) -> None:
        """Send a message; an error shows in `what_broke`, so that whoever is amid other transfers goes on."""
        if self.socket.closed:
            return
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the connection has just broken, which its monitor tells
        except zmq.ZMQError:
            _LOG.exception("longctx: nothing can be sent to %s", self.address)
            self._has_failed = True

    def what_broke(self) -> Outcome | None:
        """Whether the connection was lost or refused since the last call."""
        broke: Outcome | None = "failed" if self._has_failed else None
        while self.monitor.poll(0):
            broke = "lost" if recv_monitor_message(self.monitor)["event"] & _LOSSES else "refused"
        return broke

    def close(self) -> None:
        self.network.drop(self.socket)
        self.monitor.close(linger=0)
