"""What a step computes: plain data that the scheduler makes and an executor runs."""

from dataclasses import dataclass, field
from typing import NamedTuple

from longctx.serving.predictor.work import Work
from longctx.serving.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence: positions `start` to `start + num_tokens - 1`.

    `samples`: whether the token after them is sampled. `decodes`: whether they are the one token that the step
    before has sampled, which the host need not know yet.
    """

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int
    samples: bool
    decodes: bool


class TableRun(NamedTuple):
    """Entries of a page table: those of `slot` from `first` on become `pages`."""

    slot: int
    first: int
    pages: list[int]


@dataclass
class Batch:
    """One step. `copies` (source, target) and `tables` are done first, in order; `admitted` have new slots.

    `work` is what it asks of the device, `predicted` the seconds that it should take.
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
