"""The channel on which process 0 sends step messages to all others in order: ZeroMQ publish and subscribe.

Only processes of the group can read it: its key is made for one run, and process 0 sends it to those that it admits.

It is no collective, which would queue behind the step that is in flight. A message without requests has some hundred
bytes, however long contexts are.

Source: Mnemosyne, section 5, and Medha, section 4.4 (sequence state replicated on every worker, ZeroMQ).
"""

import json
import time
from typing import Any, NamedTuple

import zmq

from longctx.serving.distributed.network import Address, Key, Network


class Message(NamedTuple):
    """A message of plain data; large arrays travel as raw bytes in `frames`."""

    header: dict[str, Any]
    frames: list[bytes]


class Sender:
    """The end of process 0. Receivers subscribe, see `wait_for`; they don't get what was sent before that."""

    def __init__(self, network: Network, key: Key, ports: tuple[int, int]) -> None:
        self.socket = network.serve(zmq.XPUB, key)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.port = network.bind(self.socket, ports)
        self.num_sent, self.bytes_sent = 0, 0

    def wait_for(self, processes: set[int], timeout: float) -> None:
        """Wait until these processes have subscribed.

        Raises:
          TimeoutError: some have not within `timeout` seconds.
        """
        deadline, missing = time.monotonic() + timeout, {_name(process) for process in processes}
        while missing:
            if not self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                names = b", ".join(sorted(missing)).decode()
                raise TimeoutError(f"{names} did not connect to port {self.port} within {timeout:g} s: is it closed?")
            missing.discard(self.socket.recv()[1:])

    def send(self, header: dict[str, Any], frames: list[bytes] | None = None) -> None:
        """Send a message to all receivers; `header` is plain data for JSON."""
        parts = [json.dumps({"number": self.num_sent, **header}).encode(), *(frames or [])]
        self.socket.send_multipart(parts)
        self.num_sent += 1
        self.bytes_sent += sum(map(len, parts))


class Receiver:
    """The end of another process."""

    def __init__(self, network: Network, key: Key, port: int, process: int) -> None:
        self._socket = network.connect(zmq.SUB, key)
        self._socket.connect(f"tcp://{Address(network.ip, port)}")
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


def _name(process: int) -> bytes:
    return f"process {process}".encode()
