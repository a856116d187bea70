"""Common parts of sender and receiver: a thread that owns ZeroMQ sockets, and who may reach them."""

import contextlib
import ipaddress
import logging
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import zmq

_LOG = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1  # after an error that is of no transfer, so that it does not come at once again


class SocketThread(ABC):
    """A thread that polls sockets, and calls `_tick` five times within each silence timeout.

    Subclasses register their sockets with `_poller`, and start `_thread`.
    """

    def __init__(self, name: str, silence_timeout: float) -> None:
        self._name, self._tick_seconds = name, silence_timeout / 5
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"longctx {name}", daemon=True)

    def post(self, call: Callable[[], object]) -> None:
        """Have the thread run a call; never waits. After `close` nothing happens.

        Args:
          call: without arguments; its result is dropped, and its error logged.
        """
        self._calls.put(call)
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: it has ended
            self._waker.send(b"\0")

    def close(self) -> None:
        """End all transfers and close all sockets. It may be called more than once."""
        self._is_closing = True
        self.post(lambda: None)
        self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def _receive(self) -> None:
        """Read what has come, and send what may be sent."""

    @abstractmethod
    def _tick(self) -> None:
        """Give up what is silent."""

    @abstractmethod
    def _finish(self) -> None:
        """End all transfers, and close the sockets."""

    def _recover(self) -> None:
        """Act on an error that was logged: by default go on, as it is of no transfer."""
        time.sleep(_PAUSE_SECONDS)

    def _run(self) -> None:
        next_tick = time.monotonic()
        try:
            while not self._is_closing:
                try:
                    self._poller.poll(max(0, int(1000 * (next_tick - time.monotonic()))) + 1)
                    self._run_calls()
                    if time.monotonic() >= next_tick:
                        next_tick = time.monotonic() + self._tick_seconds
                        self._tick()
                    self._receive()
                except Exception:
                    _LOG.exception("longctx: the %s failed", self._name)
                    self._recover()
        finally:
            self._is_closing = True
            try:
                self._run_calls()
            finally:
                self._finish()
                self._woken.close()
                self._waker.close()

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for _ in range(self._calls.qsize()):
            self._calls.get_nowait()()  # kept by no variable, as it may hold a block
        if not self._calls.empty():
            self.post(lambda: None)  # more have come meanwhile, whose sign may just have been read


def check_ip(ip: str, may_be_reached: bool) -> None:
    """Raise ValueError unless this is an IP address, and one that other machines can't reach unless they may."""
    try:
        is_loopback = ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    except ValueError:
        raise ValueError(f"ip must be an IP address, got {ip!r}") from None
    if not (may_be_reached or is_loopback):
        raise ValueError(f"ip {ip} can be reached from other machines: transfers need a secret")
