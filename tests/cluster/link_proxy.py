"""A link on loopback that a test cuts, slows, stalls, or flips bits on."""

import contextlib
import socket
import threading
import time


class LinkProxy:
    """Forwards connections to an address; closes with `with`.

    Attributes:
      bytes_back: bytes that came from the sender of pages.
      flip_at: which of these bytes gets a bit flipped; None: none.
      bytes_per_second: how fast it forwards; None: as fast as it can.
      is_stalled: whether it holds back everything.
    """

    def __init__(self, address: str, own_port: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", own_port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes_back = 0
        self.flip_at: int | None = None
        self.bytes_per_second: float | None = None
        self.is_stalled = False
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Close all connections; new ones are forwarded again."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()
        self.cut()

    def __enter__(self) -> "LinkProxy":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._sockets += [near, far]
                for source, sink, is_back in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._forward, args=(source, sink, is_back), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 14)):
                while self.is_stalled:
                    time.sleep(0.01)
                if is_back:
                    if self.flip_at is not None and 0 <= self.flip_at - self.bytes_back < len(data):
                        data[self.flip_at - self.bytes_back] ^= 1 << self.flip_at % 8
                    self.bytes_back += len(data)
                    if self.bytes_per_second is not None:
                        time.sleep(len(data) / self.bytes_per_second)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
