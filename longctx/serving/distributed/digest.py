"""Digest of an engine's decisions, which processes and replays compare, and the last decisions for error messages."""

import hashlib
import struct
from collections import deque
from collections.abc import Sequence as List
from itertools import chain, islice
from typing import Literal

from longctx.serving.scheduler.batch import Batch

_NUM_SHOWN = 8
_DIGEST_BYTES = 8
_EXCHANGES = ("", "kvp", "pass_q", "pass_kv", "all_gather")


class DecisionDigest:
    """Running hash of all planned batches and sampled tokens, and the last few of them as text.

    The hash is BLAKE2b over integers of 64 bits, little-endian: the same in every process and version of Python.

    Attributes:
      count: decisions so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        # As bytes: batches that are kept alive make those after them slow, as their memory is not used again.
        self._last: deque[tuple[int, bytes, bool]] = deque(maxlen=_NUM_SHOWN)

    @property
    def digest(self) -> bytes:
        """Digest of all decisions so far."""
        return self._hash.digest()

    def add_plan(self, batch: Batch) -> None:
        """Add a planned batch: its chunks and its new page table entries."""
        self._add(batch.index, plan_bytes(batch), is_plan=True)

    def add_tokens(self, batch: Batch, tokens: List[int]) -> None:
        """Add the tokens sampled from a batch."""
        self._add(batch.index, pack("q", (batch.index, len(tokens), *tokens)), is_plan=False)

    def _add(self, index: int, decision: bytes, is_plan: bool) -> None:
        self._hash.update(decision)
        self.count += 1
        self._last.append((index, decision, is_plan))

    def __str__(self) -> str:
        return "\n".join(
            describe(decision) if is_plan else f"  step {index} sampled {list(unpack('q', decision)[2:])}"
            for index, decision, is_plan in tuple(self._last)
        )


def describe(plan: bytes) -> str:
    """Describe a plan, as from `plan_bytes`, in a line of text."""
    index, count = struct.unpack_from("<2q", plan)
    flags = len(plan) - 2 * count
    exchange = plan[-1] if flags % 8 else 0
    numbers = iter(unpack("q", plan[: flags // 8 * 8])[2:])
    take = lambda size: list(islice(numbers, size))  # noqa: E731
    ranks: list[list[int]] = []
    if count:
        sizes = take(1)
        sizes = take(1) * count if sizes == [-1] else sizes + take(count - 1)
        alike = plan[16:24] == struct.pack("<q", -1)
        ranks = [take(sizes[0])] * count if alike else [take(size) for size in sizes]
    slots, starts, counts = take(count), take(count), take(count)
    rows = "; ".join(
        f"slot {slot}: {size} from {start} on ranks {own}"
        for slot, start, size, own in zip(slots, starts, counts, ranks, strict=True)
    )
    tables = []
    for slot in numbers:
        first, size = take(2)
        tables.append((slot, first, *take(size)))
    by = f"; {_EXCHANGES[exchange]}" if exchange else ""
    return f"  step {index} computes {rows or 'nothing'}; tables {tables}{by}"


def plan_bytes(batch: Batch) -> bytes:
    """Encode what a batch decides as bytes: no two decisions have the same."""
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
    if batch.exchange is not None:
        flags += bytes([_EXCHANGES.index(batch.exchange.name)])
    return pack("q", numbers) + flags  # a byte each, at the end


def pack(kind: Literal["i", "q"], numbers: List[int]) -> bytes:
    """Pack integers as bytes, little-endian: of 32 bits each ("i"), or 64 ("q")."""
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def unpack(kind: Literal["i", "q"], packed: bytes) -> tuple[int, ...]:
    """Unpack integers that were packed."""
    return struct.unpack(f"<{len(packed) // (4 if kind == 'i' else 8)}{kind}", packed)
