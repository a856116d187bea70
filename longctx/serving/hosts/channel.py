"""What process 0 tells all others in every step, in order: ZeroMQ from one to many, never a collective.

A collective would queue behind the step that is under way. A message of no news has some hundred bytes, however long
contexts are.

Source: Mnemosyne, 5, and Medha, 4.4 (sequence state replicated on every worker, ZeroMQ).
"""

import json
from typing import Any, NamedTuple

import zmq

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class Message(NamedTuple):
    """`header` is JSON; `frames` are the bytes of what is large."""

    header: dict[str, Any]
    frames: list[bytes]


class Sender:
    """Process 0's end. Others come with `wait_for`; what is sent before that is lost to them."""

    def __init__(self, context: Context) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self.port = self._socket.bind_to_random_port("tcp://*")
        self.num_sent, self.bytes_sent = 0, 0

    def wait_for(self, count: int, timeout: float) -> None:
        """Until so many others listen.

        Raises:
          TimeoutError: they don't.
        """
        for _ in range(count):
            if not self._socket.poll(int(1000 * timeout)):
                raise TimeoutError(f"a process that has joined does not listen after {timeout:g} s")
            self._socket.recv()

    def send(self, header: dict[str, Any], frames: list[bytes] | None = None) -> None:
        parts = [json.dumps({"number": self.num_sent, **header}).encode(), *(frames or [])]
        self._socket.send_multipart(parts)
        self.num_sent += 1
        self.bytes_sent += sum(map(len, parts))

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """Another process's end."""

    def __init__(self, context: Context, address: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._socket.subscribe(b"")
        self._next = 0

    def receive(self) -> Message:
        """The next message, however long that takes: whether its sender lives, `Watch` knows.

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
