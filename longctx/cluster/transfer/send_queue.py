"""Bounds the bytes of blocks that a sender has handed to its socket and that have not left."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable

import numpy as np

_WAIT_SECONDS = 0.1  # between two looks at whether a transfer was closed


class SendQueue:
    """Room for blocks on their way out. ZeroMQ itself queues without a limit, however slowly a receiver reads.

    Args:
      most_each: bytes for one receiver, of all its transfers. most: bytes for all receivers. One block is always
        admitted for a receiver that has none, so that those who don't read stop nobody else.
    """

    def __init__(self, most_each: int, most: int) -> None:
        self._most_each, self._most = most_each, most
        self._changed = threading.Condition()  # guards what follows
        self._queued: Counter[bytes] = Counter()
        self._total = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are queued."""
        return self._total

    def put(self, peer: bytes, data: np.ndarray, is_closed: Callable[[], bool]) -> np.ndarray | None:
        """Wait for room; return a view of `data` `[bytes]` that takes it until nobody refers to it. None: closed."""
        num_bytes = data.nbytes
        with self._changed:
            while not self._has_room(peer, num_bytes):
                if is_closed():
                    return None
                self._changed.wait(_WAIT_SECONDS)
            self._queued[peer] += num_bytes
            self._total += num_bytes
        view = data[:]  # ZeroMQ lets go of it when the bytes have left, or the connection has broken
        weakref.finalize(view, self._leave, peer, num_bytes).atexit = False
        return view

    def _has_room(self, peer: bytes, num_bytes: int) -> bool:
        queued = self._queued[peer]
        return not queued or (queued + num_bytes <= self._most_each and self._total + num_bytes <= self._most)

    def _leave(self, peer: bytes, num_bytes: int) -> None:
        with self._changed:
            self._total -= num_bytes
            self._queued[peer] -= num_bytes
            if not self._queued[peer]:
                del self._queued[peer]
            self._changed.notify_all()
