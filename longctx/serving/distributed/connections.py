"""Connections between process 0 and each other process: control messages, step messages, and a relay for JAX.

Control connections carry small messages from the first request to join on. Process 0 has one socket, which tells its
peers apart by routing ids that they draw at random when they start. So it notices which peer is gone, and a process
outside the group can't look like a peer.

Step messages are published by process 0 to all others in order. Only processes of the group can read them: their key is
made for one run, and process 0 sends it to those that it admits. A message without requests has some hundred bytes,
however long contexts are. It is no collective, which would queue behind the step that is in flight.

The relay carries the connections of JAX's coordination service through the control connections. The service has no
authentication: any process that reaches it can say that it is process 1, and JAX then aborts all. So it listens on a
socket in a folder of process 0's user alone, and clients in other processes connect to sockets like it, whose bytes
travel encrypted. For the same reason a client does not notice that process 0 is gone before the watchdog has said so.

Source: Mnemosyne, section 5, and Medha, section 4.4 (sequence state replicated on every worker, ZeroMQ).
"""

import contextlib
import itertools
import json
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.serving.distributed.network import Address, Key, Network, RejectedConnections

_MAX_MESSAGE_BYTES = 1 << 24
_MAX_MESSAGES = 100  # that one call of `receive` takes: others may send without pause
PROCESS_0 = b""
"""Name of process 0 in other processes, in place of a routing id."""


class Received(NamedTuple):
    """Control message; `peer` is its sender's routing id."""

    peer: bytes
    kind: str
    value: Any
    data: bytes


class ControlServer:
    """Control connections of process 0.

    Raises:
      ValueError: it can't listen at the network's address and this port.
    """

    def __init__(self, network: Network, key: Key, port: int) -> None:
        self.socket = network.serve(zmq.ROUTER, key)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone is an error
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again may have the old connection still
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self.address = Address(network.ip, port)
        self.rejected = RejectedConnections(f"process 0 at {self.address}")
        self.rejected.monitor(self.socket)
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
                self.rejected.add()

    def is_lost(self, peer: bytes) -> bool:
        return not self.send(peer, "alive")


class ControlClient:
    """Control connection of another process."""

    def __init__(self, network: Network, key: Key, address: Address, process: int) -> None:
        self.socket = network.connect(zmq.DEALER, key)
        self.socket.setsockopt(zmq.ROUTING_ID, f"process {process} ".encode() + os.urandom(16))
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing while there is no connection
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._was_connected = self._is_lost = False
        self.address = address
        self.socket.connect(f"tcp://{address}")

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
    """Read an untrusted message; raises ValueError if it is none of ours."""
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


Control = ControlServer | ControlClient


class Sender:
    """Sender of step messages in process 0. Receivers that subscribe, see `wait_for`, get what is sent from then on."""

    def __init__(self, network: Network, key: Key, ports: tuple[int, int]) -> None:
        self.socket = network.serve(zmq.XPUB, key)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.port = network.bind(self.socket, ports)
        self._next = 0

    def wait_for(self, processes: set[int], timeout: float) -> None:
        """Wait until these processes have subscribed; TimeoutError: some have not within `timeout` seconds."""
        deadline, missing = time.monotonic() + timeout, {_name(process) for process in processes}
        while missing:
            if not self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                names = b", ".join(sorted(missing)).decode()
                raise TimeoutError(f"{names} did not connect to port {self.port} within {timeout:g} s: is it closed?")
            missing.discard(self.socket.recv()[1:])

    def send(self, data: bytes) -> None:
        """Send a message to all receivers."""
        self.socket.send_multipart([self._next.to_bytes(8, "little"), data])
        self._next += 1


class Receiver:
    """Receiver of step messages in another process."""

    def __init__(self, network: Network, key: Key, port: int, process: int) -> None:
        self._socket = network.connect(zmq.SUB, key)
        self._socket.connect(f"tcp://{Address(network.ip, port)}")
        self._socket.subscribe(b"")  # all messages
        self._socket.subscribe(_name(process))  # no message has this prefix: it tells the sender who has subscribed
        self._next = 0

    def receive(self) -> bytes:
        """Wait for the next message without a timeout, as the watchdog notices when the sender is gone."""
        number, data = self._socket.recv_multipart()
        if (found := int.from_bytes(number, "little")) != self._next:
            raise RuntimeError(f"step message {self._next} was lost: the next one received was {found}")
        self._next += 1
        return data


def _name(process: int) -> bytes:
    return f"process {process}".encode()


_CHUNK_BYTES = 1 << 16
_MAX_PATH = 90  # a socket's path may have some 100 characters
_CONNECT_SECONDS = 0.05  # between two tries to reach the service, which may start after its clients

Send = Callable[[bytes, int, bytes], None]


class Relay:
    """One process's end of the relay. Each connection has a thread for either direction.

    Args:
      is_first: process 0 has the service, and connects to it; the others listen in its place.

    Attributes:
      address: the service's, for `jax.distributed.initialize`.
      send: sends bytes of a connection of a peer; no bytes: the connection ends. Any thread calls it.
    """

    def __init__(self, is_first: bool) -> None:
        folder = tempfile.mkdtemp(prefix="longctx-")
        if len(folder) > _MAX_PATH:
            shutil.rmtree(folder)
            folder = tempfile.mkdtemp(prefix="longctx-", dir="/tmp")
        self._folder = Path(folder)
        self._path = str(self._folder / "jax")
        self.address = f"unix:{self._path}"
        self.send: Send = lambda peer, number, data: None
        self._unsent: dict[tuple[bytes, int], queue.SimpleQueue[bytes]] = {}  # of each connection; no bytes: its end
        self._is_first, self._is_closed = is_first, False
        self._listener = socket.socket(socket.AF_UNIX)
        if not is_first:
            self._listener.bind(self._path)
            self._listener.listen()
            _start(self._accept)

    def receive(self, peer: bytes, number: int, data: bytes) -> None:
        """Pass on what came from a peer's end of a connection."""
        key = peer, number
        if key not in self._unsent and self._is_first and data:
            self._open(key, self._connect)
        if key in self._unsent:
            self._unsent[key].put(data)

    def close(self) -> None:
        """Listen no more, and remove the folder. Connections stay open: JAX would abort the process if they broke."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends the wait of `_accept`
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                end = self._listener.accept()[0]
                self._open((PROCESS_0, number), lambda end=end: end)  # type: ignore[misc]

    def _connect(self) -> socket.socket | None:
        while not self._is_closed:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.connect(self._path)
            except OSError:
                end.close()
                time.sleep(_CONNECT_SECONDS)
            else:
                return end
        return None

    def _open(self, key: tuple[bytes, int], connect: Callable[[], socket.socket | None]) -> None:
        self._unsent[key] = queue.SimpleQueue()
        _start(lambda: self._write(key, connect))

    def _write(self, key: tuple[bytes, int], connect: Callable[[], socket.socket | None]) -> None:
        """Pass on to JAX what came for a connection, until its other end has closed or JAX has."""
        if (end := connect()) is None:
            return
        _start(lambda: self._read(key, end))
        with contextlib.suppress(OSError):
            while data := self._unsent[key].get():
                end.sendall(data)
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # which ends `_read`
        end.close()

    def _read(self, key: tuple[bytes, int], end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := end.recv(_CHUNK_BYTES):
                self.send(*key, data)
        self.send(*key, b"")
        self._unsent[key].put(b"")


def _start(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="longctx-relay", daemon=True).start()
