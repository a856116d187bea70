"""`Watchdog`: connects process 0 to each other process, for small messages, and ends all when one of them is gone.

ZeroMQ sends heartbeats in C++ threads, which neither a compilation nor Python's lock delays. When a process dies or is
stopped (SIGSTOP), its heartbeats end and its connections close, which a socket monitor reports. A process that notices
this prints the cause on standard error and exits at once, even while its main thread waits: no step can complete any
more, and a collective may wait for ever. Process 0 sends the cause to the others, which do the same.
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

EXIT_STATUS = 70
"""Exit status of a process that ends because another one is gone, or can't go on with it."""

_POLL_MS = 20
_FAILED, _STUCK = "failed", "stuck"


class Peer:
    """The connection to one other process."""

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
    """Make a socket for a `Peer`; it notices within the timeout that the other end is gone."""
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
    """Sends and receives in a thread of its own, and ends the process when a peer is gone or a step makes no progress.

    Args:
      me: name of this process in messages.
      peers: all other processes in process 0, and only process 0 in the others.
      failure_timeout: seconds.

    Attributes:
      explain: returns this process's last decisions as text, for when those of another process differ.
      allows_disconnects: whether peers may close their connections without ending this process.
    """

    def __init__(self, me: str, peers: list[Peer], failure_timeout: float) -> None:
        self.me, self.peers, self.failure_timeout = me, peers, failure_timeout
        self.explain: Callable[[], str] = str
        self._outbox: queue.SimpleQueue[tuple[Peer, bytes]] = queue.SimpleQueue()
        self.allows_disconnects = False
        self._limit: tuple[float, str, float] | None = None  # deadline, name and seconds of what the main thread does
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="longctx-watchdog", daemon=True)
        self._thread.start()

    # Called from the main thread.

    def send(self, peer: Peer, kind: str, value: Any) -> None:
        """Queue a value of plain data for a peer."""
        self._outbox.put((peer, json.dumps([kind, value]).encode()))

    def receive(self, peer: Peer, timeout: float, what: str) -> Any:
        """Wait for the next value from a peer; `what` names it in the error.

        Raises:
          TimeoutError: nothing came within `timeout` seconds.
        """
        try:
            return peer.inbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"{peer} did not say {what} within {timeout:g} s") from None

    @contextlib.contextmanager
    def limit(self, what: str, seconds: float) -> Any:
        """A context that ends the process if its body takes longer."""
        self._limit = time.monotonic() + seconds, what, seconds
        try:
            yield
        finally:
            self._limit = None

    def broadcast_failure(self, cause: str) -> None:
        """Send an error of this process to all peers, which then exit."""
        if not self._is_closed:
            # The error may follow from the loss of a peer, and the watchdog's thread then reports that, the true cause.
            time.sleep(0.5)
            for peer in self.peers:
                self.send(peer, _FAILED, f"{self.me}: {cause}")
            self.close()

    def wait_for_end(self, timeout: float) -> None:
        """Wait until process 0 lets all processes disconnect, or has failed."""
        self._thread.join(timeout)

    def close(self) -> None:
        """Stop watching: from now on peers may disconnect."""
        self._is_closed = self.allows_disconnects = True
        self._thread.join(timeout=2)

    # Called from the watchdog's thread.

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # the process must not go on unwatched
            self._exit(f"{self.me} can't watch its peers: {type(error).__name__}: {error}")

    def _watch(self) -> None:
        poller = zmq.Poller()
        for peer in self.peers:
            poller.register(peer.socket, zmq.POLLIN)
            poller.register(peer.monitor, zmq.POLLIN)
        while not self._is_closed:
            self._flush()
            ready = dict(poller.poll(_POLL_MS))
            for peer in self.peers:
                while peer.socket.poll(0):
                    self._handle(peer, *json.loads(peer.socket.recv()))
            for peer in self.peers:
                if peer.monitor in ready and not self.allows_disconnects:
                    recv_monitor_message(peer.monitor)
                    # A message that it sent before it disconnected may give the cause.
                    while peer.socket.poll(0):
                        self._handle(peer, *json.loads(peer.socket.recv()))
                    self._exit(f"{peer} is gone: its connection broke, or it did not answer")
            limit = self._limit
            if limit is not None and time.monotonic() > limit[0]:
                self._exit(f"{self.me} has waited for the results of {limit[1]} for more than {limit[2]:g} s", _STUCK)
        self._flush()
        for peer in self.peers:
            peer.close()

    def _flush(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                peer, message = self._outbox.get_nowait()
                with contextlib.suppress(zmq.Again):  # the peer is gone, which its monitor reports
                    peer.socket.send(message, zmq.NOBLOCK)

    def _handle(self, peer: Peer, kind: str, value: Any) -> None:
        if kind in (_FAILED, _STUCK):
            self._exit(value, kind)
        elif kind == "differs":
            self._exit(f"{value}\n{self.me} decided:\n{self.explain()}")
        elif kind == "bye":
            self._is_closed = self.allows_disconnects = True
        else:
            peer.inbox.put(value)

    def _exit(self, cause: str, kind: str = _FAILED) -> None:
        """Send the cause to all peers, print it, and exit.

        Different decisions may be why a process is stuck, so `_STUCK` prints those of every process.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for peer in self.peers:
            self.send(peer, kind, cause)
        self._flush()
        if kind == _STUCK:
            cause += f"\n{self.me} decided:\n{self.explain()}"
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            print(f"longctx: {self.me} ends: {cause}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        time.sleep(0.5)  # until ZeroMQ has sent the cause
        os._exit(EXIT_STATUS)
