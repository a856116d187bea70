"""Hashes of token sequences by which blocks of different engines compare: chained XXH3-64 (Mooncake, RFC 1527)."""

import struct
from collections.abc import Iterable

import xxhash

_PAIR = struct.Struct("<QQ")


def sequence_hashes(tokens: bytes, block_size: int, seed: int = 0, previous: int | None = None) -> Iterable[int]:
    """The hash of each full block and of all before it.

    Args:
      tokens: little-endian uint32. What is left after the last full block is ignored.
      previous: the hash of the block before them; None: there is none.
    """
    digest, step = xxhash.xxh3_64_intdigest, 4 * block_size
    for first in range(0, len(tokens) - step + 1, step):
        local = digest(tokens[first : first + step], seed)
        previous = local if previous is None else digest(_PAIR.pack(previous, local), seed)
        yield previous
