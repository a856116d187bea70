"""A store of pages beyond this machine, as a tier below the disk."""

import contextlib
import importlib
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key

CHECKSUM_BYTES = 8
_PATIENCE = 0.005  # seconds that a thread which may not wait does wait for an answer
# What opens a store, by the scheme of its URL: `open_store(url)` of a module.
_MODULES = {"mooncake": "longctx.cluster.transfer.mooncake_store"}


class RemoteStore(Protocol):
    """Values of equal size by name. It may lose them at any time, and may be slow; threads of the tiers wait for it.

    Each value is a page's payload after its checksum, which its reader compares. An exception is a miss.
    """

    def exists(self, names: Sequence[bytes]) -> int:
        """How many leading names it has."""
        ...

    def get(self, names: Sequence[bytes], out: np.ndarray) -> int:
        """Fill rows of `out` `[names, bytes]` uint8 with the values of leading names; how many."""
        ...

    def put(self, name: bytes, value: bytes) -> bool:
        """Keep a value; whether it was kept."""
        ...


def remote_name(fingerprint: bytes, key: Key, part: PageSlice) -> bytes:
    """What a page's part is called there: other models and parts have other names."""
    (layer, last_layer), (head, last_head) = part
    return fingerprint + key + b"%d-%d-%d-%d" % (layer, last_layer, head, last_head)


def check_store_url(url: str) -> str:
    """Return the URL's scheme; ValueError: no store is known for it."""
    scheme, separator, address = url.partition("://")
    if scheme not in _MODULES or not separator or not address:
        known = ", ".join(f"{name}://HOST:PORT" for name in _MODULES)
        raise ValueError(f"store must be one of {known}, got {url!r}")
    return scheme


def open_remote(url: str) -> RemoteStore:
    """Open the store of a URL.

    Raises:
      ValueError: no store is known for it, or it can't be reached.
    """
    return importlib.import_module(_MODULES[check_store_url(url)]).open_store(url)


class RemoteProbe:
    """Asks a remote store what it has, for threads that may not wait: a store that hangs costs each of them little."""

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._is_asking = threading.Lock()

    def exists(self, names: Sequence[bytes]) -> int:
        """How many leading names it has; 0 if it doesn't say so at once, or has not yet answered the last time."""
        if not names or not self._is_asking.acquire(blocking=False):
            return 0
        answer, is_answered = [0], threading.Event()

        def ask() -> None:
            try:
                with contextlib.suppress(Exception):  # an error is a miss
                    answer[0] = min(self._remote.exists(names), len(names))
            finally:
                self._is_asking.release()
                is_answered.set()

        threading.Thread(target=ask, name="kv-probe", daemon=True).start()
        is_answered.wait(_PATIENCE)
        return answer[0] if is_answered.is_set() else 0
