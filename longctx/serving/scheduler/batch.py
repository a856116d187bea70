"""Steps as plain data, which the scheduler makes and an executor runs."""

from dataclasses import dataclass, field
from typing import NamedTuple

from longctx.serving.kv_cache.connector import PageLoad, PageStore
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


class TableRun(NamedTuple):
    """Entries of a page table: those of `slot` from `first` on become `pages`."""

    slot: int
    first: int
    pages: list[int]


class Exchange(NamedTuple):
    """Exchange of a step's rows over the context ranks, and the reason for it.

    Attributes:
      name: of sharded rows `"pass_kv"`, `"pass_q"` or `"all_gather"`; `"kvp"` if there are only replicated ones.
      reason: the rule, and what it went by, in one line.
    """

    name: str
    reason: str


@dataclass
class Batch:
    """One step. Decodes come first in `chunks`. `tables` are written before it; `admitted` have new slots.

    `blocked` had no room when it was planned: those that run and wait for memory to grow, and the first of those that
    wait to be admitted.

    `work` is what it asks of the rank that takes longest, `predicted` the seconds that it should take; `rank_seconds`
    are those of each context rank. `exchange` is what its rows exchange over ranks; None: nothing.

    Before it runs, in this order: the loads of sequences named in `dropped` end, so that none of their pages is written
    any more; pages in `stores` are read; `loads` begin.
    """

    index: int
    chunks: list[Chunk] = field(default_factory=list)
    tables: list[TableRun] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    blocked: list[Sequence] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    predicted: float = 0.0
    rank_seconds: tuple[float, ...] = ()
    exchange: Exchange | None = None
    stores: list[PageStore] = field(default_factory=list)
    loads: list[PageLoad] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def advance(self, times: int, steps: int, seconds: float) -> None:
        """Become the batch `steps` steps later, which has the same decodes `times` tokens later.

        Args:
          times: tokens.
          steps: numbers of steps.
          seconds: that it is predicted to take.
        """
        self.index += steps
        self.admitted, self.tables = [], []
        if self.chunks:
            self.chunks = [chunk._replace(start=chunk.start + times) for chunk in self.chunks]
            self.work = self.work._replace(decode_keys=self.work.decode_keys + times * len(self.chunks))
            self.predicted, self.rank_seconds = seconds, (seconds,)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the results."""
        return [chunk.sequence for chunk in self.chunks if chunk.samples]
