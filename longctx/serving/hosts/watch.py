"""Connections between process 0 and each other one: small messages, and the end of all when one of them is gone.

ZeroMQ's own heartbeats run in threads of C++, which neither a compilation nor Python's lock holds up. They stop when a
process dies or is stopped (SIGSTOP); then its connection closes, which a monitor tells. Whoever learns of that says the
cause on standard error, process 0 tells it to the others, and the process exits at once, whatever its main thread waits
for: nothing can be computed any more, and a collective may wait for ever.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.serving.hosts.channel import Context, Socket

# Of a process that ends because another one did, or because it can't go on with it.
EXIT_STATUS = 70
_POLL_MS = 20


class Peer:
    """The connection to one process."""

    def __init__(self, process: int, name: str, socket: Socket) -> None:
        self.process, self.name, self.socket = process, name, socket
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=1000)

    def __str__(self) -> str:
        return f"process {self.process} ({self.name})"


def make_pair(context: Context, failure_timeout: float) -> Socket:
    """A socket for a `Peer`, which notices within the timeout that the other end is gone."""
    socket = context.socket(zmq.PAIR)
    for option, value in (
        (zmq.SNDHWM, 0),
        (zmq.RCVHWM, 0),
        (zmq.LINGER, 1000),
        (zmq.HEARTBEAT_IVL, int(200 * failure_timeout)),
        (zmq.HEARTBEAT_TIMEOUT, int(500 * failure_timeout)),
    ):
        socket.setsockopt(option, value)
    return socket


class Watch:
    """Sends and receives in a thread of its own, and ends the process when a peer is gone or work stands still.

    Args:
      me: how this process is called in logs.
      explain: what this process knows of its last decisions, for a peer that decided otherwise.
    """

    def __init__(self, me: str, peers: list[Peer], failure_timeout: float) -> None:
        self.me, self.peers, self.failure_timeout = me, peers, failure_timeout
        self.explain: Callable[[], str] = str
        self._outbox: queue.SimpleQueue[tuple[Peer, bytes]] = queue.SimpleQueue()
        self._since: float | None = None  # when what the main thread waits for began
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="longctx-watch", daemon=True)
        self._thread.start()

    # From the main thread.

    def send(self, peer: Peer, kind: str, value: Any) -> None:
        self._outbox.put((peer, json.dumps([kind, value]).encode()))

    def receive(self, peer: Peer, timeout: float, what: str) -> Any:
        """The next value that a peer sent.

        Raises:
          TimeoutError: nothing came.
        """
        try:
            return peer.inbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"{peer} did not say {what} within {timeout:g} s") from None

    @contextlib.contextmanager
    def limit(self) -> Any:
        """What is done inside shall not take longer than the timeout."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def tell_failure(self, cause: str) -> None:
        """To all peers, which end. Whoever knows better, that one of them is gone, may say so first."""
        if not self._is_over:
            time.sleep(0.5)
            for peer in self.peers:
                self.send(peer, "failed", f"{self.me}: {cause}")
            self.close()

    def wait_for_end(self, timeout: float) -> None:
        """Until process 0 says that all may go."""
        self._thread.join(timeout)

    def close(self) -> None:
        """From now on peers may go."""
        self._is_over = True
        self._thread.join(timeout=2)

    # In the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        for peer in self.peers:
            poller.register(peer.socket, zmq.POLLIN)
            poller.register(peer.monitor, zmq.POLLIN)
        while not self._is_over:
            self._flush()
            ready = dict(poller.poll(_POLL_MS))
            for peer in self.peers:
                if peer.socket in ready:
                    self._take(peer, *json.loads(peer.socket.recv()))
            for peer in self.peers:
                if peer.monitor in ready and not self._is_over:
                    recv_monitor_message(peer.monitor)
                    # What it said before it went says more.
                    while peer.socket.poll(0):
                        self._take(peer, *json.loads(peer.socket.recv()))
                    self._die(f"{peer} is gone: its connection broke, or it did not answer")
            since = self._since
            if since is not None and time.monotonic() - since > self.failure_timeout:
                self._die(f"{self.me} has waited for a step's results for more than {self.failure_timeout:g} s")
        self._flush()
        for peer in self.peers:
            peer.close()

    def _flush(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                peer, message = self._outbox.get_nowait()
                with contextlib.suppress(zmq.Again):  # it is gone, which its monitor tells
                    peer.socket.send(message, zmq.NOBLOCK)

    def _take(self, peer: Peer, kind: str, value: Any) -> None:
        if kind == "failed":
            self._die(value)
        elif kind == "differs":
            self._die(f"{value}\n{self.me} decided:\n{self.explain()}")
        elif kind == "bye":
            self._is_over = True
        else:
            peer.inbox.put(value)

    def _die(self, cause: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        for peer in self.peers:
            self.send(peer, "failed", cause)
        self._flush()
        print(f"longctx: {self.me} ends: {cause}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # until it has been sent
        os._exit(EXIT_STATUS)
