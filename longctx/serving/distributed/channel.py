"""What process 0 tells all others in every step, in order: ZeroMQ from one to many, never a collective.

A collective would queue behind the step that is under way. A message of no news has some hundred bytes, however long
contexts are.

Source: Mnemosyne, 5, and Medha, 4.4 (sequence state replicated on every worker, ZeroMQ).
"""

import json
import time
from typing import Any, NamedTuple

import zmq

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def make_context() -> Context:
    """Of sockets that speak IPv6 too."""
    context: Context = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)
    return context


def set_heartbeats(socket: Socket, failure_timeout: float) -> None:
    """Notice within 0.7 of the timeout that the other end is gone; and keep idle connections alive."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(200 * failure_timeout))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(500 * failure_timeout))


def bind(socket: Socket, ports: tuple[int, int]) -> int:
    """To any free port of a range, both ends included.

    Raises:
      ValueError: there is none.
    """
    try:
        return socket.bind_to_random_port("tcp://*", ports[0], ports[1] + 1, max_tries=200)
    except zmq.ZMQBindError:
        raise ValueError(f"ports must have a free one from {ports[0]} to {ports[1]} on process 0's host") from None


class Message(NamedTuple):
    """`header` is JSON; `frames` are the bytes of what is large."""

    header: dict[str, Any]
    frames: list[bytes]


class Sender:
    """Process 0's end. Others come with `wait_for`; what is sent before that is lost to them."""

    def __init__(self, context: Context, ports: tuple[int, int], failure_timeout: float) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        set_heartbeats(self._socket, failure_timeout)
        self.port = bind(self._socket, ports)
        self.num_sent, self.bytes_sent = 0, 0

    def wait_for(self, processes: set[int], timeout: float) -> None:
        """Until these listen.

        Raises:
          TimeoutError: some don't.
        """
        deadline, missing = time.monotonic() + timeout, {_name(process) for process in processes}
        while missing:
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                names = b", ".join(sorted(missing)).decode()
                raise TimeoutError(f"{names} did not come to port {self.port} within {timeout:g} s: is it closed?")
            missing.discard(self._socket.recv()[1:])

    def send(self, header: dict[str, Any], frames: list[bytes] | None = None) -> None:
        parts = [json.dumps({"number": self.num_sent, **header}).encode(), *(frames or [])]
        self._socket.send_multipart(parts)
        self.num_sent += 1
        self.bytes_sent += sum(map(len, parts))

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """Another process's end."""

    def __init__(self, context: Context, address: str, process: int, failure_timeout: float) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        set_heartbeats(self._socket, failure_timeout)
        self._socket.connect(address)
        self._socket.subscribe(b"")  # to all; and once more, so that the sender knows who is there
        self._socket.subscribe(_name(process))
        self._next = 0

    def receive(self) -> Message:
        """The next message, however long that takes: whether its sender lives, `Watchdog` knows.

        Raises:
          RuntimeError: one was lost.
        """
        first, *frames = self._socket.recv_multipart()
        header = json.loads(first)
        if header["number"] != self._next:
            raise RuntimeError(f"step message {self._next} is lost: the next one to come was {header['number']}")
        self._next += 1
        return Message(header, frames)

    def close(self) -> None:
        self._socket.close()


def _name(process: int) -> bytes:
    return f"process {process}".encode()
