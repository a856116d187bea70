"""What other threads want of a thread that waits for sockets."""

import contextlib
import queue
import socket
from collections.abc import Callable, Iterator


class Mailbox:
    """Calls for one thread, whose poller waits for `fileno()` too."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def post(self, call: Callable[[], None]) -> None:
        """Have the thread call this; never waits. After `close` nothing happens."""
        self._calls.put(call)
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: it has ended
            self._writer.send(b"\0")

    def take(self) -> Iterator[Callable[[], None]]:
        """The calls that have come, in their order."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        with contextlib.suppress(queue.Empty):
            for _ in range(self._calls.qsize()):
                yield self._calls.get_nowait()
        if not self._calls.empty():
            self.post(lambda: None)  # more have come meanwhile, whose sign may just have been read

    def fileno(self) -> int:
        return self._reader.fileno()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
