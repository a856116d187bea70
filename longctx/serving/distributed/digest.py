"""A digest of an engine's decisions, which processes and replays compare, and the last decisions for error messages."""

import hashlib
import struct
from collections import deque
from collections.abc import Sequence as List
from itertools import chain
from typing import Literal

from longctx.serving.scheduler.batch import Batch

_NUM_SHOWN = 8
_DIGEST_BYTES = 8


class DecisionDigest:
    """A running hash of all planned batches and sampled tokens, and the last few of them as text.

    The hash is BLAKE2b over integers of 64 bits, little-endian: the same in every process and version of Python.

    Attributes:
      count: decisions so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._last: deque[tuple[Batch, List[int] | None]] = deque(maxlen=_NUM_SHOWN)

    @property
    def digest(self) -> str:
        """Of all decisions so far, in hexadecimal."""
        return self._hash.hexdigest()

    @property
    def raw(self) -> bytes:
        """`digest`, as bytes."""
        return self._hash.digest()

    def add_plan(self, batch: Batch) -> None:
        """Add a planned batch: its chunks and its new page table entries."""
        self._hash.update(plan_bytes(batch))
        self.count += 1
        self._last.append((batch, None))

    def add_tokens(self, batch: Batch, tokens: List[int]) -> None:
        """Add the tokens sampled from a batch."""
        self._hash.update(pack("q", (batch.index, len(tokens), *tokens)))
        self.count += 1
        self._last.append((batch, tokens))

    def __str__(self) -> str:
        return "\n".join(
            describe(batch) if tokens is None else f"  step {batch.index} sampled {list(tokens)}"
            for batch, tokens in tuple(self._last)
        )


def describe(batch: Batch) -> str:
    """A planned batch as a line of text."""
    rows = "; ".join(f"slot {c.slot}: {c.num_tokens} from {c.start} on ranks {list(c.ranks)}" for c in batch.chunks)
    tables = [(run.slot, run.first, *run.pages) for run in batch.tables]
    return f"  step {batch.index} computes {rows or 'nothing'}; tables {tables}"


def plan_bytes(batch: Batch) -> bytes:
    """What a batch decides, as bytes: no two decisions have the same."""
    numbers = [batch.index, len(batch.chunks)]
    flags = b""
    if batch.chunks:
        # By columns: a loop over the rows of a step would cost several times as much.
        _, slots, starts, counts, samples, _, ranks, sharded = zip(*batch.chunks, strict=True)
        if ranks.count(ranks[0]) == len(ranks):
            numbers.append(-1)
            ranks = ranks[:1]
        numbers += map(len, ranks)
        numbers += chain.from_iterable(ranks)
        numbers += slots
        numbers += starts
        numbers += counts
        flags = bytes(samples) + bytes(sharded)
    for slot, first, pages in batch.tables:
        numbers += slot, first, len(pages)
        numbers += pages
    return pack("q", numbers) + flags


def pack(kind: Literal["i", "q"], numbers: List[int]) -> bytes:
    """Integers as bytes, little-endian: of 32 bits each ("i"), or 64 ("q")."""
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)
