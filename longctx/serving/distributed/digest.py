"""Digest of an engine's decisions, which processes and replays compare, and the last decisions for error messages."""

import hashlib
import struct
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from functools import partial
from itertools import chain
from typing import Any

from longctx.serving.scheduler.batch import Batch, Exchange, TableRun

_NUM_SHOWN = 8
_DIGEST_BYTES = 8
_EXCHANGES = ("", "kvp", "pass_q", "pass_kv", "all_gather")


class DecisionDigest:
    """Running hash of all planned batches and sampled tokens, and the last few of them as text.

    The hash is BLAKE2b over integers of 64 bits, little-endian: the same in every process and version of Python.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        # Functions of plain data: batches that are kept alive make those after them slow.
        self._last: deque[Callable[[], str]] = deque(maxlen=_NUM_SHOWN)

    @property
    def digest(self) -> bytes:
        """Digest of all decisions so far."""
        return self._hash.digest()

    def add_plan(self, batch: Batch) -> None:
        """Add a planned batch: its chunks and its new page table entries."""
        rows = [chunk[1:7] for chunk in batch.chunks]
        self._add(plan_bytes(batch), partial(_describe, batch.index, rows, batch.tables, batch.exchange))

    def add_tokens(self, batch: Batch, tokens: List[int]) -> None:
        """Add the tokens sampled from a batch."""
        decision = _pack((batch.index, len(tokens), *tokens))
        self._add(decision, partial("  step {} sampled {}".format, batch.index, list(tokens)))

    def _add(self, decision: bytes, describe: Callable[[], str]) -> None:
        self._hash.update(decision)
        self._last.append(describe)

    def __str__(self) -> str:
        return "\n".join(describe() for describe in tuple(self._last))


def describe(batch: Batch) -> str:
    """Describe what a batch decides in a line of text."""
    return _describe(batch.index, [chunk[1:7] for chunk in batch.chunks], batch.tables, batch.exchange)


def _describe(index: int, rows: List[Any], tables: List[TableRun], exchange: Exchange | None) -> str:
    computed = "; ".join(
        f"slot {slot}: {count} from {start} on ranks {list(ranks)}" for slot, start, count, _, _, ranks in rows
    )
    runs = [(run.slot, run.first, *run.pages, *run.windows) for run in tables]
    by = "" if exchange is None else f"; {exchange.name}"
    return f"  step {index} computes {computed or 'nothing'}; tables {runs}{by}"


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
    for slot, first, pages, windows in batch.tables:
        numbers += slot, first, len(pages)
        numbers += pages
        if windows:
            numbers += -1, len(windows)  # no slot has this number
            numbers += windows
    if batch.exchange is not None:
        flags += bytes([_EXCHANGES.index(batch.exchange.name)])
    return _pack(numbers) + flags  # a byte each, at the end


def _pack(numbers: List[int]) -> bytes:
    """Pack integers as bytes, 64 bits each, little-endian."""
    return struct.pack(f"<{len(numbers)}q", *numbers)
