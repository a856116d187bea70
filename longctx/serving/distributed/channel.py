"""The channel on which process 0 sends step messages to all others in order: ZeroMQ publish and subscribe.

It is no collective, which would queue behind the step that is in flight. A message without requests has some hundred
bytes, however long contexts are.

Source: Mnemosyne, section 5, and Medha, section 4.4 (sequence state replicated on every worker, ZeroMQ).
"""

import json
import time
from typing import Any, NamedTuple

import zmq

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def make_context() -> Context:
    """A context whose sockets also speak IPv6."""
    context: Context = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)
    return context


def set_heartbeats(socket: Socket, failure_timeout: float) -> None:
    """Make a socket notice within 0.7 of the timeout that its peer is gone, and keep idle connections alive."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(200 * failure_timeout))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(500 * failure_timeout))


def bind(socket: Socket, ports: tuple[int, int]) -> int:
    """Bind to a free port of an inclusive range, and return it.

    Raises:
      ValueError: all of them are taken.
    """
    try:
        return socket.bind_to_random_port("tcp://*", ports[0], ports[1] + 1, max_tries=200)
    except zmq.ZMQBindError:
        raise ValueError(f"ports must have a free one from {ports[0]} to {ports[1]} on process 0's host") from None


class Message(NamedTuple):
    """A message of plain data; large arrays travel as raw bytes in `frames`."""

    header: dict[str, Any]
    frames: list[bytes]


class Sender:
    """The end of process 0. Receivers subscribe, see `wait_for`; they don't get what was sent before that."""

    def __init__(self, context: Context, ports: tuple[int, int], failure_timeout: float) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        set_heartbeats(self._socket, failure_timeout)
        self.port = bind(self._socket, ports)
        self.num_sent, self.bytes_sent = 0, 0

    def wait_for(self, processes: set[int], timeout: float) -> None:
        """Wait until these processes have subscribed.

        Raises:
          TimeoutError: some have not within `timeout` seconds.
        """
        deadline, missing = time.monotonic() + timeout, {_name(process) for process in processes}
        while missing:
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                names = b", ".join(sorted(missing)).decode()
                raise TimeoutError(f"{names} did not connect to port {self.port} within {timeout:g} s: is it closed?")
            missing.discard(self._socket.recv()[1:])

    def send(self, header: dict[str, Any], frames: list[bytes] | None = None) -> None:
        """Send a message to all receivers; `header` is plain data for JSON."""
        parts = [json.dumps({"number": self.num_sent, **header}).encode(), *(frames or [])]
        self._socket.send_multipart(parts)
        self.num_sent += 1
        self.bytes_sent += sum(map(len, parts))

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """The end of another process."""

    def __init__(self, context: Context, address: str, process: int, failure_timeout: float) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        set_heartbeats(self._socket, failure_timeout)
        self._socket.connect(address)
        self._socket.subscribe(b"")  # all messages
        self._socket.subscribe(_name(process))  # no message has this prefix: it tells the sender who has subscribed
        self._next = 0

    def receive(self) -> Message:
        """Wait for the next message without a timeout, as `Watchdog` notices when the sender is gone.

        Raises:
          RuntimeError: a message was lost.
        """
        first, *frames = self._socket.recv_multipart()
        header = json.loads(first)
        if header["number"] != self._next:
            raise RuntimeError(f"step message {self._next} was lost: the next one received was {header['number']}")
        self._next += 1
        return Message(header, frames)

    def close(self) -> None:
        self._socket.close()


def _name(process: int) -> bytes:
    return f"process {process}".encode()
