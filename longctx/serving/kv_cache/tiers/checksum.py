"""Checksums of pages outside of devices: of their bytes, of whose they are, and of which part.

XXH3 finds accidents, at the speed of memory. It is no signature: who may write to a cache is trusted.
"""

import xxhash

from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.kv_cache.page_pool import Key


def checksum(data: bytes | memoryview) -> int:
    """XXH3, 64 bits, of contiguous memory."""
    return xxhash.xxh3_64_intdigest(data)


class PageChecksum:
    """Checksums of pages of one model: right bytes under another page's key, or as another part, are wrong."""

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint

    def __call__(self, key: Key, part: PageSlice, data: bytes | memoryview) -> int:
        """Of the contiguous payload of a page's part."""
        seed = xxhash.xxh3_64_intdigest(b"%d %b %b %r" % (len(key), key, self._fingerprint, tuple(part)))
        return xxhash.xxh3_64_intdigest(data, seed=seed)
