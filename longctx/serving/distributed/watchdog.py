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

from longctx.serving.distributed.channel import Context, Socket, set_heartbeats

# Of a process that ends because another one did, or because it can't go on with it.
EXIT_STATUS = 70
_POLL_MS = 20
_FAILED, _STUCK = "failed", "stuck"


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
    ):
        socket.setsockopt(option, value)
    set_heartbeats(socket, failure_timeout)
    return socket


class Watchdog:
    """Sends and receives in a thread of its own, and ends the process when a peer is gone or work stands still.

    Args:
      me: how this process is called in what it says.

    Attributes:
      explain: tells this process's last decisions, for a peer that decided otherwise.
    """

    def __init__(self, me: str, peers: list[Peer], failure_timeout: float) -> None:
        self.me, self.peers, self.failure_timeout = me, peers, failure_timeout
        self.explain: Callable[[], str] = str
        self._outbox: queue.SimpleQueue[tuple[Peer, bytes]] = queue.SimpleQueue()
        self.is_parting = False  # peers may go
        self._limit: tuple[float, str, float] | None = None  # until when the main thread may wait for what, seconds
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
    def limit(self, what: str, seconds: float) -> Any:
        """What is done inside shall not take longer."""
        self._limit = time.monotonic() + seconds, what, seconds
        try:
            yield
        finally:
            self._limit = None

    def broadcast_failure(self, cause: str) -> None:
        """To all peers, which end. Whoever knows better, that one of them is gone, may say so first."""
        if not self._is_over:
            time.sleep(0.5)
            for peer in self.peers:
                self.send(peer, _FAILED, f"{self.me}: {cause}")
            self.close()

    def wait_for_end(self, timeout: float) -> None:
        """Until process 0 says that all may go."""
        self._thread.join(timeout)

    def close(self) -> None:
        """From now on peers may go."""
        self._is_over = self.is_parting = True
        self._thread.join(timeout=2)

    # In the thread.

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:  # nobody would watch any more
            self._die(f"{self.me} can't watch its peers: {type(error).__name__}: {error}")

    def _look(self) -> None:
        poller = zmq.Poller()
        for peer in self.peers:
            poller.register(peer.socket, zmq.POLLIN)
            poller.register(peer.monitor, zmq.POLLIN)
        while not self._is_over:
            self._flush()
            ready = dict(poller.poll(_POLL_MS))
            for peer in self.peers:
                while peer.socket.poll(0):
                    self._take(peer, *json.loads(peer.socket.recv()))
            for peer in self.peers:
                if peer.monitor in ready and not self.is_parting:
                    recv_monitor_message(peer.monitor)
                    # What it said before it went says more.
                    while peer.socket.poll(0):
                        self._take(peer, *json.loads(peer.socket.recv()))
                    self._die(f"{peer} is gone: its connection broke, or it did not answer")
            limit = self._limit
            if limit is not None and time.monotonic() > limit[0]:
                self._die(f"{self.me} has waited for the results of {limit[1]} for more than {limit[2]:g} s", _STUCK)
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
        if kind in (_FAILED, _STUCK):
            self._die(value, kind)
        elif kind == "differs":
            self._die(f"{value}\n{self.me} decided:\n{self.explain()}")
        elif kind == "bye":
            self._is_over = self.is_parting = True
        else:
            peer.inbox.put(value)

    def _die(self, cause: str, kind: str = _FAILED) -> None:
        """`_STUCK`: perhaps since decisions differ, so all show theirs."""
        if self._is_over:
            return
        self._is_over = True
        for peer in self.peers:
            self.send(peer, kind, cause)
        self._flush()
        if kind == _STUCK:
            cause += f"\n{self.me} decided:\n{self.explain()}"
        with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
            print(f"longctx: {self.me} ends: {cause}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        time.sleep(0.5)  # until it has been sent
        os._exit(EXIT_STATUS)
