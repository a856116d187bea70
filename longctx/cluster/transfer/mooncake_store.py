"""Mooncake's distributed store as a tier: pages that engines of several machines share, in the memory of all of them.

Each engine gives a segment of its memory to the store; a master knows where values are and evicts them. Like the
transfer engine it has neither encryption nor access control: it is for networks that are trusted.

Source: Mooncake, section 4 of its later versions (Mooncake Store), by the implementation that the authors published.
"""

import socket
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from longctx import extras
from longctx.cluster.transfer.mooncake import mooncake_loaded

_REACH_SECONDS = 3.0
_OPTIONS = {"segment_bytes": 1 << 30, "buffer_bytes": 64 << 20}
_TEXTS = {"protocol": "tcp", "devices": "", "ip": ""}


class MooncakeStore:
    """A `RemoteStore` behind `MooncakeDistributedStore`. Several threads may wait for it.

    Args:
      store: that was set up.
      buffer_bytes: of its local buffer, which what is read at a time has to fit.
    """

    def __init__(self, store: Any, buffer_bytes: int) -> None:
        self._store, self._buffer_bytes = store, buffer_bytes
        self._reading = threading.Lock()  # of the buffer

    def exists(self, names: Sequence[bytes]) -> int:
        """Count leading names that it has."""
        found = self._store.batch_is_exist([name.hex() for name in names])
        return next((i for i, there in enumerate(found) if there != 1), len(names))

    def get(self, names: Sequence[bytes], out: np.ndarray) -> int:
        """Fill rows of `out` `[names, bytes]` uint8 with the values of leading names; returns how many."""
        count, group = 0, max(1, self._buffer_bytes // 2 // out.shape[1])
        while count < len(names):
            some = [name.hex() for name in names[count : count + group]]
            with self._reading:
                values = self._store.get_batch(some)
            for value in values:
                if len(value) != out.shape[1]:  # it is not there: the value is empty
                    return count
                out[count] = np.frombuffer(value, np.uint8)
                count += 1
        return count

    def put(self, name: bytes, value: bytes) -> bool:
        """Keep a value; returns whether it was kept."""
        return bool(self._store.put(name.hex(), value) == 0)

    def close(self) -> None:
        """Leave the store, and take this machine's segment along."""
        self._store.close()


def open_store(url: str) -> MooncakeStore:
    """Open the store of a master, `mooncake://HOST:PORT`.

    Args:
      url: may end with options, as in `?segment_bytes=8589934592&protocol=rdma`: the bytes of memory that this
        process gives to the store (1 GiB) and those of its buffer (64 MiB), the protocol and its devices, and this
        machine's ip.

    Raises:
      MissingExtra: Mooncake is not installed, or libraries of the system are missing.
      ValueError: the URL is none, or there is no master.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None:
        raise ValueError(f"store must be mooncake://HOST:PORT, got {url!r}")
    texts, numbers = _read_options(url, parts.query)
    extras.check("mooncake", f"store {url}")
    try:  # its own client waits for a master for ever
        with socket.create_connection((host, port), _REACH_SECONDS) as reached:
            own_ip = reached.getsockname()[0]
    except OSError as error:
        raise ValueError(f"store {url} can't be reached: {error}") from None
    with mooncake_loaded("Mooncake's store"):
        from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    failed = store.setup(
        texts["ip"] or own_ip,
        "P2PHANDSHAKE",
        numbers["segment_bytes"],
        numbers["buffer_bytes"],
        texts["protocol"],
        texts["devices"],
        f"{host}:{port}",
    )
    if failed:
        raise ValueError(f"store {url} can't be set up: Mooncake's error {failed}")
    return MooncakeStore(store, numbers["buffer_bytes"])


def _read_options(url: str, query: str) -> tuple[dict[str, str], dict[str, int]]:
    texts, numbers = dict(_TEXTS), dict(_OPTIONS)
    for name, value in parse_qsl(query):
        if name in texts:
            texts[name] = value
        elif name in numbers and value.isdecimal():
            numbers[name] = int(value)
        else:
            raise ValueError(f"store {url} has no such option: {name}={value}")
    return texts, numbers
