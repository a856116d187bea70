"""Control connections: small messages between process 0 and each other process, from the first request to join on.

Process 0 has one socket, which tells its peers apart by routing ids that they draw at random when they start. So it
notices which peer is gone, and nothing that a stranger does looks like a peer.
"""

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.serving.distributed.network import Address, Key, Network, Socket
from longctx.serving.distributed.strangers import Strangers

_MAX_MESSAGE_BYTES = 1 << 24
_MAX_MESSAGES = 100  # that one call of `receive` takes: strangers may send without pause
PROCESS_0 = b""
"""What other processes call process 0, in place of a routing id."""


class Received(NamedTuple):
    """A message; `peer` is its sender's routing id."""

    peer: bytes
    kind: str
    value: Any
    data: bytes


@runtime_checkable
class Control(Protocol):
    """One process's end of its control connections. Only one thread at a time may use it."""

    socket: Socket

    def send(self, peer: bytes, kind: str, value: Any = None, data: bytes = b"") -> bool:
        """Send a value of plain data, and bytes; returns whether there is a connection to the peer."""
        ...

    def receive(self) -> Iterator[Received]:
        """Messages that have come, some at a time."""
        ...

    def is_lost(self, peer: bytes) -> bool:
        """Whether the connection to a peer broke: its process ended, or no heartbeat came."""
        ...


class ControlServer:
    """The end of process 0.

    Attributes:
      address: where it listens.
      strangers: counts connections and messages of others.

    Raises:
      ValueError: it can't listen at the network's address and this port.
    """

    def __init__(self, network: Network, key: Key, port: int) -> None:
        self.socket = network.serve(zmq.ROUTER, key)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone is an error
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again may have the old connection still
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self.address = Address(network.ip, port)
        self.strangers = Strangers(f"process 0 at {self.address}")
        self.strangers.monitor(self.socket)
        try:
            self.socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            raise ValueError(f"process 0 can't listen on {self.address}: {error}") from None

    def send(self, peer: bytes, kind: str, value: Any = None, data: bytes = b"") -> bool:
        try:
            self.socket.send_multipart([peer, *_encode(kind, value, data)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def receive(self) -> Iterator[Received]:
        for _ in range(_MAX_MESSAGES):
            if not self.socket.poll(0):
                return
            peer, *parts = self.socket.recv_multipart()
            try:
                yield Received(peer, *decode(parts))
            except ValueError:
                self.strangers.add()

    def is_lost(self, peer: bytes) -> bool:
        return not self.send(peer, "alive")


class ControlClient:
    """The end of another process.

    Attributes:
      address: where process 0 listens.
    """

    def __init__(self, network: Network, key: Key, address: Address, process: int) -> None:
        self.socket = network.connect(zmq.DEALER, key)
        self.socket.setsockopt(zmq.ROUTING_ID, f"process {process} ".encode() + os.urandom(16))
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing while there is no connection
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._was_connected = self._is_lost = False
        self.address = address
        self.socket.connect(f"tcp://{address}")

    def move(self, address: Address) -> None:
        """Connect to another address."""
        if address != self.address:
            self.socket.disconnect(f"tcp://{self.address}")
            self.socket.connect(f"tcp://{address}")
            self.address = address

    def send(self, peer: bytes, kind: str, value: Any = None, data: bytes = b"") -> bool:
        try:
            self.socket.send_multipart(_encode(kind, value, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[Received]:
        while self.socket.poll(0):
            yield Received(PROCESS_0, *decode(self.socket.recv_multipart()))

    def is_lost(self, peer: bytes) -> bool:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._was_connected, self._is_lost = True, False
            else:
                self._is_lost = self._was_connected
        return self._is_lost


def _encode(kind: str, value: Any, data: bytes) -> list[bytes]:
    head = json.dumps([kind, value]).encode()
    return [head, data] if data else [head]


def decode(parts: list[bytes]) -> tuple[str, Any, bytes]:
    """Read a message that anybody may have sent.

    Raises:
      ValueError: it is none of ours.
    """
    if len(parts) not in (1, 2):
        raise ValueError("a message must have one or two parts")
    try:
        head = json.loads(parts[0])
    except (ValueError, RecursionError):
        raise ValueError("a message must begin with JSON") from None
    match head:
        case [str(kind), value]:
            return kind, value, parts[1] if len(parts) == 2 else b""
    raise ValueError("a message must have a kind and a value")
