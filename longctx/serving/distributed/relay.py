"""Carries the connections of JAX's coordination service through the control connections.

The service has no authentication: whoever reaches it can say that it is process 1, and JAX then aborts all. So it
listens on a socket in a folder of process 0's user alone, and clients in other processes connect to sockets like it,
whose bytes travel encrypted. For the same reason a client does not notice that process 0 is gone before the watchdog
has said so.
"""

import contextlib
import selectors
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from longctx.serving.distributed.control import PROCESS_0

_CHUNK_BYTES = 1 << 16
_MAX_PATH = 90  # a socket's path may have some 100 characters

Send = Callable[[bytes, int, bytes], None]


class Relay:
    """One process's end.

    Args:
      is_first: process 0 has the service, and connects to it; the others listen in its place.

    Attributes:
      address: the service's, for `jax.distributed.initialize`.
      send: sends bytes of a connection of a peer; no bytes: the connection ends.
    """

    def __init__(self, is_first: bool) -> None:
        folder = tempfile.mkdtemp(prefix="longctx-")
        if len(folder) > _MAX_PATH:
            shutil.rmtree(folder)
            folder = tempfile.mkdtemp(prefix="longctx-", dir="/tmp")
        self._folder = Path(folder)
        self._path = str(self._folder / "jax")
        self.address = f"unix:{self._path}"
        self.send: Send = lambda peer, number, data: None
        self._connections: dict[tuple[bytes, int], _Connection] = {}
        self._next_number = 0
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        if not is_first:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self._path)
            self._listener.listen()
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_first = is_first

    def fileno(self) -> int:
        """Becomes readable when `update` has work."""
        return self._selector.fileno()

    def receive(self, peer: bytes, number: int, data: bytes) -> None:
        """Pass on what came from a peer's end of a connection."""
        key = peer, number
        if key not in self._connections and self._is_first and data:
            self._connections[key] = _Connection()
        if key not in self._connections:
            return
        if data:
            self._connections[key].unsent += data
            self._pass_on(key)
        else:
            self._drop(key)

    def update(self) -> None:
        """Pass on what can be passed on now; never waits."""
        for key in list(self._connections):
            self._pass_on(key)
        for ready, _ in self._selector.select(0):
            if ready.fileobj is self._listener:
                self._next_number += 1
                key = PROCESS_0, self._next_number
                self._connections[key] = _Connection()
                self._open(key, self._listener.accept()[0])
            elif ready.data in self._connections:
                self._read(ready.data)

    def close(self) -> None:
        """Listen no more, and remove the folder. Connections stay open: JAX would abort the process if they broke."""
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self, key: tuple[bytes, int], end: socket.socket) -> None:
        end.setblocking(False)
        self._connections[key].end = end
        self._selector.register(end, selectors.EVENT_READ, key)

    def _pass_on(self, key: tuple[bytes, int]) -> None:
        """Send to JAX what it takes now; the service may not have started yet."""
        connection = self._connections[key]
        if connection.end is None:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.connect(self._path)
            except OSError:
                end.close()
                return
            self._open(key, end)
        assert connection.end is not None
        try:
            while connection.unsent:
                del connection.unsent[: connection.end.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(key)

    def _read(self, key: tuple[bytes, int]) -> None:
        end, data = self._connections[key].end, b""
        assert end is not None
        with contextlib.suppress(OSError):
            data = end.recv(_CHUNK_BYTES)
        if data:
            self.send(*key, data)
        else:
            self._end(key)

    def _end(self, key: tuple[bytes, int]) -> None:
        """JAX has closed its end."""
        self.send(*key, b"")
        self._drop(key)

    def _drop(self, key: tuple[bytes, int]) -> None:
        end = self._connections.pop(key).end
        if end is not None:
            self._selector.unregister(end)
            end.close()


class _Connection:
    """A connection to JAX in this process; `end` is None until its service has started."""

    def __init__(self) -> None:
        self.end: socket.socket | None = None
        self.unsent = bytearray()
