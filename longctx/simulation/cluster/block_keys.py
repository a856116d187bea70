"""Keys of pages as the conductor knows them: the first 64 bits, as KV events have them."""

from collections.abc import Sequence as List

import numpy as np

from longctx.serving.kv_cache.page_pool import Key

_BYTES = 8


def block_key(key: Key) -> int:
    """Of one page."""
    return int.from_bytes(key[:_BYTES], "big")


def block_keys(keys: List[Key]) -> np.ndarray:
    """Of several, uint64 `[pages]`."""
    return np.frombuffer(b"".join([key[:_BYTES] for key in keys]), ">u8").astype(np.uint64)
