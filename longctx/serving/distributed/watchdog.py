"""`Watchdog`: user of the control connections while an engine runs; it ends all processes when one of them is gone.

ZeroMQ sends heartbeats in C++ threads, which neither a compilation nor Python's lock delays. When a process dies or is
stopped (SIGSTOP), its heartbeats end and its connection breaks. A process that notices this prints the cause on
standard error and exits at once, even while its main thread waits: no step can complete any more, and a collective may
wait for ever. Process 0 sends the cause to the others, which do the same.
"""

import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from longctx.serving.distributed.connections import Control, ControlServer, Received, Relay

EXIT_STATUS = 70
"""Exit status of a process that ends because another one is gone, or can't go on with it."""

_POLL_MS = 20
_SECONDS_BETWEEN_CHECKS = 0.1
_FAILED, _STUCK = "failed", "stuck"


class Peer:
    """Another process: its number, the name of its host, and its routing id."""

    def __init__(self, process: int, host_name: str, routing_id: bytes) -> None:
        self.process, self.host_name, self.routing_id = process, host_name, routing_id
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __str__(self) -> str:
        return f"process {self.process} ({self.host_name})"


class Watchdog:
    """Thread that sends and receives, and ends the process when a peer is gone or a step makes no progress.

    Attributes:
      relay: as given.
      explain: returns this process's last decisions as text, for when those of another process differ.
      allows_disconnects: whether peers may close their connections without ending this process.
    """

    def __init__(self, me: str, control: Control, peers: list[Peer], relay: Relay, failure_timeout: float) -> None:
        self.me, self.peers, self.failure_timeout = me, peers, failure_timeout
        self.explain: Callable[[], str] = str
        self._control, self.relay = control, relay
        self._outbox: queue.SimpleQueue[tuple[bytes, str, Any, bytes]] = queue.SimpleQueue()  # as `Control.send` takes
        relay.send = lambda peer, number, data: self._outbox.put((peer, "relay", number, data))
        self.allows_disconnects = False
        self._limit: tuple[float, str, float] | None = None  # deadline, name and seconds of what the main thread does
        self._is_closed = False
        self._ended = threading.Event()
        self._present = {peer.routing_id: peer for peer in peers}
        self._next_check = self._next_refusal = 0.0
        self._thread = threading.Thread(target=self._run, name="longctx-watchdog", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port of the control connection."""
        return self._control.address.port

    # Called from the main thread.

    def send(self, peer: Peer, kind: str, value: Any) -> None:
        """Queue a value of plain data for a peer."""
        self._outbox.put((peer.routing_id, kind, value, b""))

    def receive(self, peer: Peer, timeout: float, what: str) -> Any:
        """Wait for the next value from a peer; `what` names it in the error."""
        try:
            return peer.inbox.get(timeout=None if timeout == math.inf else timeout)
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
        self._ended.wait(timeout)

    def wait_for_disconnects(self, timeout: float) -> None:
        """Wait until all peers have closed their connections, or `timeout` seconds have passed."""
        deadline = time.monotonic() + timeout
        while self._present and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop watching: from now on peers may disconnect."""
        self._is_closed = self.allows_disconnects = True
        self._thread.join(timeout=2)
        self.relay.close()

    # Called from the watchdog's thread.

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # the process must not go on unwatched
            self._exit(f"{self.me} can't watch its peers: {type(error).__name__}: {error}")
        finally:
            self._ended.set()

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control.socket, zmq.POLLIN)
        while not self._is_closed:
            self._flush()
            poller.poll(_POLL_MS)
            self._receive()
            if time.monotonic() > self._next_check:
                self._check_peers()
                self._next_check = time.monotonic() + _SECONDS_BETWEEN_CHECKS
            limit = self._limit
            if limit is not None and time.monotonic() > limit[0]:
                self._exit(f"{self.me} has waited for the results of {limit[1]} for more than {limit[2]:g} s", _STUCK)
        self._flush()

    def _check_peers(self) -> None:
        if isinstance(self._control, ControlServer):
            self._control.rejected.update()
        for routing_id, peer in list(self._present.items()):
            if self._control.is_lost(routing_id):
                self._receive()  # a message that it sent before its connection broke may give the cause
                del self._present[routing_id]
                if not self.allows_disconnects:
                    self._exit(f"{peer} is gone: its connection broke, or it did not answer")

    def _flush(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._control.send(*self._outbox.get_nowait())  # `_check_peers` notices if the peer is gone

    def _receive(self) -> None:
        for message in self._control.receive():
            if message.peer in self._present:
                self._handle(self._present[message.peer], message)
            elif isinstance(self._control, ControlServer):
                self._control.rejected.add()
                if time.monotonic() > self._next_refusal:  # not all of them: unread answers would pile up
                    self._next_refusal = time.monotonic() + _SECONDS_BETWEEN_CHECKS
                    self._control.send(message.peer, "refused", "all processes have come already")

    def _handle(self, peer: Peer, message: Received) -> None:
        match message.kind:
            case "failed" | "stuck":
                self._exit(message.value, message.kind)
            case "differs":
                self._exit(f"{message.value}\n{self.me} decided:\n{self.explain()}")
            case "bye":
                self.allows_disconnects = True
                self._ended.set()
            case "relay":
                self.relay.receive(peer.routing_id, message.value, message.data)
            case "value":
                peer.inbox.put(message.value)
            case "report":
                peer.reports.put(message.value)

    def _exit(self, cause: str, kind: str = _FAILED) -> None:
        """Print the cause, send it to all peers, and exit.

        Different decisions may be why a process is stuck, so `_STUCK` prints those of every process.
        """
        if self._is_closed:
            return
        self._is_closed = True
        text = f"{cause}\n{self.me} decided:\n{self.explain()}" if kind == _STUCK else cause
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            print(f"longctx: {self.me} ends: {text}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        for peer in self.peers:
            self.send(peer, kind, cause)
        self._flush()
        self.relay.close()
        time.sleep(0.5)  # until ZeroMQ has sent the cause
        os._exit(EXIT_STATUS)
