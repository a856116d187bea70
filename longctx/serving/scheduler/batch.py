"""What a step computes: plain data that the scheduler makes and an executor runs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence: positions `start` to `start + num_tokens - 1`.

    `samples`: whether the token after them is sampled. `decodes`: whether they are the one token that was sampled
    last, which the host need not know yet. `ranks`: the context ranks that compute them: one alone, or several, each
    all of them (KV parallelism), or, where `sharded`, all ranks, each a part.
    """

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int
    samples: bool
    decodes: bool
    ranks: tuple[int, ...] = (0,)
    sharded: bool = False

    def share(self, num_ranks: int, dealt_before: int = 0) -> tuple[int, int]:
        """(tokens before, tokens) that each of its ranks has to do with, about; sharded after so many other tokens."""
        if self.sharded:
            rows = -(-(dealt_before + self.num_tokens) // num_ranks) + -dealt_before // num_ranks
            return self.start, rows
        return self.start // len(self.ranks), self.num_tokens


def parts_of(chunks: Iterable[Chunk], rank: int, num_ranks: int) -> Iterator[tuple[int, int, bool]]:
    """(tokens before, tokens, whether one is sampled) of what a rank computes, for `Work.of`."""
    if num_ranks == 1:
        yield from ((chunk.start, chunk.num_tokens, chunk.samples) for chunk in chunks)
        return
    sharded = 0
    for chunk in chunks:
        start, count = chunk.share(num_ranks, sharded)
        sharded += chunk.num_tokens if chunk.sharded else 0
        if rank in chunk.ranks and count:
            yield start, count, chunk.samples and rank == chunk.ranks[0]


class TableRun(NamedTuple):
    """Entries of a page table: those of `slot` from `first` on become `pages`."""

    slot: int
    first: int
    pages: list[int]


@dataclass
class Batch:
    """One step. `copies` (source, target) and `tables` are done first, in order; `admitted` have new slots.

    `work` is what it asks of the device that has most to do, `predicted` the seconds that it should take.
    """

    index: int
    chunks: list[Chunk] = field(default_factory=list)
    tables: list[TableRun] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    predicted: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the results."""
        return [chunk.sequence for chunk in self.chunks if chunk.samples]
