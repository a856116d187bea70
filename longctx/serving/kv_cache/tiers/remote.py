"""A store of pages beyond this machine, as a tier below the disk."""

import contextlib
import importlib
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import numpy as np

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.writer import Workers

CHECKSUM_BYTES = 8
_BELIEVED = 10.0  # seconds
_MOST_KNOWN = 1 << 16  # names
_MOST_QUESTIONS = 8
# What opens a store, by the scheme of its URL: `open_store(url)` of a module.
_MODULES = {"mooncake": "longctx.cluster.transfer.mooncake"}


@runtime_checkable
class RemoteStore(Protocol):
    """Values of equal size by name. It may lose them at any time, and may be slow; threads of the tiers wait for it.

    Each value is a page's payload after its checksum, which its reader compares. An exception is a miss.
    """

    def exists(self, names: Sequence[bytes]) -> int:
        """Return how many leading names it has."""
        ...

    def get(self, names: Sequence[bytes], out: np.ndarray) -> int:
        """Fill rows of `out` `[names, bytes]` uint8 with the values of leading names; how many."""
        ...

    def put(self, name: bytes, value: bytes) -> bool:
        """Keep a value; whether it was kept."""
        ...


def remote_name(fingerprint: bytes, key: Key, part: PageSlice) -> bytes:
    """Return the name of a page's part in a remote store: other models and parts have other names."""
    (layer, last_layer), (head, last_head) = part
    return fingerprint + key + b"%d-%d-%d-%d" % (layer, last_layer, head, last_head)


def open_remote(url: str) -> RemoteStore:
    """Open the store of a URL.

    Raises:
      ValueError: no store is known for it, or it can't be reached.
    """
    scheme, _, address = url.partition("://")
    if scheme not in _MODULES or not address:
        known = ", ".join(f"{name}://HOST:PORT" for name in _MODULES)
        raise ValueError(f"store must be one of {known}, got {url!r}")
    return importlib.import_module(_MODULES[scheme]).open_store(url)


class RemoteProbe:
    """Asks a remote store what it has, in a thread of its own, for threads that may not wait."""

    def __init__(self, remote: RemoteStore) -> None:
        self._remote, self._workers = remote, Workers(1, "kv-probe")
        self._lock = threading.Lock()  # guards what follows
        self._known: dict[bytes, float] = {}  # names that it has, until when that is believed
        self._num_questions = 0  # without an answer

    def exists(self, names: Sequence[bytes]) -> int:
        """Return how many leading names it has by its last answer; without one, it is asked for the next time."""
        count = self._count(names)
        if count < len(names):
            self.ask(names[count:])
        return count

    def ask(self, names: Sequence[bytes]) -> "Future[None] | None":
        """Ask whether it has names, for `exists`. None: there is nothing to wait for, or it has long not answered."""
        unknown, answered = list(names[self._count(names) :]), Future[None]()
        with self._lock:
            if not unknown or self._num_questions >= _MOST_QUESTIONS:
                return None
            self._num_questions += 1
        self._workers.submit(lambda: self._answer(unknown, answered))
        return answered

    def close(self) -> None:
        """End the thread, once the store has answered."""
        self._workers.close(0.0)

    def _count(self, names: Sequence[bytes]) -> int:
        now = time.monotonic()
        with self._lock:
            return next((i for i, name in enumerate(names) if self._known.get(name, 0.0) < now), len(names))

    def _answer(self, names: list[bytes], answered: "Future[None]") -> None:
        count = 0
        with contextlib.suppress(Exception):  # an error is a miss
            count = min(self._remote.exists(names), len(names))
        with self._lock:
            self._num_questions -= 1
            until = time.monotonic() + _BELIEVED
            for name in names[:count]:
                self._known.pop(name, None)
                self._known[name] = until  # the last to be forgotten
            for name in itertools.islice([*self._known], max(0, len(self._known) - _MOST_KNOWN)):
                del self._known[name]
        answered.set_result(None)
