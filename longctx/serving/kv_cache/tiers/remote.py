"""A store of pages beyond this machine, as a tier below the disk."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key

CHECKSUM_BYTES = 8


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
