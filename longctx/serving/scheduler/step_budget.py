"""A step that is being filled: what room each rank has left, in rows and in predicted seconds."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as List

from longctx.serving.parallel_plan import ParallelPlan, is_sharded
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Chunk, parts_of
from longctx.serving.scheduler.sequence import Sequence


class Step:
    """Rows are of three kinds, each the same number on all ranks, as a compiled step has it.

    Shared rows have one place on all ranks of their sequence; sequences on other ranks may have the same places.
    Interleaved rows are spread over all ranks. What a rank computes alone comes beside these.

    Attributes:
      tokens: rows that a step may have, of all three kinds.
      limit: seconds that its slowest rank may take.
      chunks: tokens that each prompt got.
    """

    def __init__(
        self, plan: ParallelPlan, page_size: int, predictor: Predictor, tokens: int, decodes: List[Chunk]
    ) -> None:
        self.tokens, self.limit, self.chunks = tokens, math.inf, {}
        self._plan, self._page_size, self._predictor, self._budget = plan, page_size, predictor, tokens
        self._local, self._replicated, self._sharded = [0] * plan.context, [0] * plan.context, 0
        if plan.context == 1:
            self._local[0] = sum(chunk.num_tokens for chunk in decodes)
        else:
            for chunk in decodes:
                self._place(chunk.num_tokens, chunk.ranks, chunk.sharded)
        self._works = [Work.of(parts_of(decodes, rank, plan.context)) for rank in range(plan.context)]
        self._begin = self.rows
        self._begun: float | None = None

    chunks: dict[Sequence, int]

    @property
    def rows(self) -> int:
        """Of the largest rank of each kind."""
        return -(-self._sharded // self._plan.context) + max(self._replicated) + max(self._local)

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(map(self._predictor.seconds, self._works))

    def take(self, sequence: Sequence, count: int) -> None:
        if count > 0:
            self.chunks[sequence] = count
            ranks, sharded = self.where(sequence, count)
            self._works = self._with(sequence, count, ranks, sharded)
            self._place(count, ranks, sharded)

    def fill(self, sequences: Iterable[Sequence]) -> None:
        """Take as much of each as there is room for. On one rank, once one gets less than all of it there is none."""
        for sequence in sequences:
            count = self.largest(sequence)
            self.take(sequence, count)
            if count < sequence.remaining and self._plan.context == 1:
                return

    def meet(self, one: Sequence, other: Sequence) -> bool:
        """Whether two prompts' next tokens are computed on some rank in common."""
        return not {*self.where(one, one.remaining)[0]}.isdisjoint(self.where(other, other.remaining)[0])

    def beside(self, sequence: Sequence, count: int) -> "Step":
        """The same with a chunk that is not taken yet."""
        other = Step(self._plan, self._page_size, self._predictor, self.tokens, ())
        other.limit, other._begin, other._begun = self.limit, self._begin, self._begun
        other._local, other._replicated, other._sharded = list(self._local), list(self._replicated), self._sharded
        other._works = list(self._works)
        other.take(sequence, count)
        other.chunks = {}
        return other

    def largest(self, sequence: Sequence, share: float = 1.0) -> int:
        """The most tokens of a prompt for which there is room, in `share` of what the decodes leave of the step."""
        spread = self._plan.context if self._is_sharded(sequence) else 1
        most = min(self.room(sequence), math.ceil(share * (self.tokens - self._begin)) * spread)
        if self.limit == math.inf or most <= 0:
            return max(0, most)
        if self._begun is None:
            self._begun = self.seconds
        limit = self._begun + share * (self.limit - self._begun)
        low, high = 0, most + 1  # low fits, high does not
        while high - low > 1:
            count = high - 1 if low == 0 and high == most + 1 else (low + high) // 2
            works = self._with(sequence, count, *self.where(sequence, count))
            if max(map(self._predictor.seconds, works)) <= limit:
                low = count
            else:
                high = count
        return self.room(sequence, low)

    def room(self, sequence: Sequence, count: int | None = None) -> int:
        """Rows that there are for a prompt, which needs no more than so many, or than it has."""
        count = sequence.remaining if count is None else count
        while count > 0:
            ranks, deals = self.where(sequence, count)
            room = self._room(ranks, deals)
            if room >= count:
                break
            # Fewer may be on fewer ranks, where there is more room.
            fewer = count if deals else min(count, self._before_growth(sequence))
            count = max(0, room) if room > 0 or fewer == count else fewer
        return count

    def _room(self, ranks: tuple[int, ...], deals: bool) -> int:
        shared, own, sharded = max(self._replicated), max(self._local), -(-self._sharded // self._plan.context)
        if deals:
            return self._plan.context * (self.tokens - shared - own) - self._sharded
        if len(ranks) == 1:
            return self.tokens - sharded - shared - self._local[ranks[0]]
        return self.tokens - sharded - own - max(self._replicated[rank] for rank in ranks)

    def _before_growth(self, sequence: Sequence) -> int:
        """Tokens that a prompt can read without taking on one more rank."""
        if self._plan.context == 1 or sequence.placement is None:
            return sequence.remaining
        number = len(sequence.pages)
        page = sequence.placement.until(number, sequence.ranks or (sequence.placement.rank(number),))
        return int(min(page * self._page_size - sequence.computed, sequence.remaining))

    def where(self, sequence: Sequence, count: int) -> tuple[tuple[int, ...], bool]:
        """The ranks that compute its next tokens, and whether these are sharded."""
        if self._plan.context == 1:
            return (0,), False
        if self._is_sharded(sequence):
            return tuple(range(self._plan.context)), True
        assert sequence.placement is not None
        stop = -(-(sequence.computed + count) // self._page_size)
        new = sequence.placement.counts(len(sequence.pages), stop)
        ranks = {*sequence.ranks, *(rank for rank, pages in enumerate(new) if pages)}
        return tuple(sorted(ranks)), False

    def _is_sharded(self, sequence: Sequence) -> bool:
        return is_sharded(self._plan, False, sequence.remaining, self._budget)

    def _place(self, count: int, ranks: tuple[int, ...], sharded: bool) -> None:
        if sharded:
            self._sharded += count
        elif len(ranks) == 1:
            self._local[ranks[0]] += count
        else:
            top = max(self._replicated[rank] for rank in ranks) + count
            for rank in ranks:
                self._replicated[rank] = top

    def _with(self, sequence: Sequence, count: int, ranks: tuple[int, ...], sharded: bool) -> list[Work]:
        """Every rank's work with one more chunk."""
        samples = count == sequence.remaining
        if len(self._works) == 1:
            return [self._works[0].with_chunk(sequence.computed, count, samples)]
        chunk = Chunk(sequence, 0, sequence.computed, count, samples, False, ranks, sharded)
        start, rows = chunk.share(self._plan.context, self._sharded)
        if not rows:
            return self._works
        return [
            work.with_chunk(start, rows, samples) if rank in ranks else work for rank, work in enumerate(self._works)
        ]
