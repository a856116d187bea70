"""A step that is being filled: what room each rank has left, in rows and in predicted seconds."""

import copy
import math
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import (
    Chunk,
    keys_by_rank,
    place_rows,
    replicated_start,
    sharded_rows,
    work_by_rank,
)
from longctx.serving.scheduler.exchange_rule import ExchangeRule
from longctx.serving.scheduler.sequence import Sequence


class Share(NamedTuple):
    """Tokens of a prompt in a step, the ranks that compute them, and whether their rows are sharded over these."""

    num_tokens: int
    ranks: tuple[int, ...]
    sharded: bool


class _RankWork(NamedTuple):
    """Work of a rank, and the seconds that it takes, by prediction."""

    rank: int
    work: Work
    seconds: float


class FilledStep:
    """A step that is being filled beside its decodes, on any number of ranks.

    Args:
      tokens: rows that it may have.
      rows, seconds: of the decodes.

    Attributes:
      limit: seconds that it may take, by prediction; infinite at first.
      shares: what each prompt got.
    """

    def __init__(self, tokens: int, rows: int, seconds: float) -> None:
        self.tokens, self.limit = tokens, math.inf
        self.shares: dict[Sequence, Share] = {}
        self._begin, self._begun = rows, seconds

    @property
    def free_rows(self) -> int:
        """Rows that the decodes leave."""
        return self.tokens - self._begin

    @property
    def free_seconds(self) -> float:
        """Seconds that the decodes leave; infinite without a limit."""
        return self.limit - self._begun

    def has_all(self, sequence: Sequence) -> bool:
        """Whether a prompt got all tokens that it may compute now."""
        return sequence in self.shares and self.shares[sequence].num_tokens == sequence.plannable


class StepBudget(FilledStep):
    """A step on several ranks, whose `limit` is of the slowest one; `LocalBudget` is one on one rank.

    Rows are of three kinds, each the same number on all ranks, as a compiled step has it.

    Local rows are computed by one rank alone. Replicated rows have one place on all ranks of their sequence; sequences
    on other ranks may have the same places. Sharded rows are spread over all ranks.

    Args:
      tokens: rows that a step may have, of all three kinds.
      decodes: chunks that are in the step already.
      rule: says whose rows are sharded; None: without predictions.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        page_size: int,
        predictor: Predictor,
        tokens: int,
        decodes: List[Chunk],
        rule: ExchangeRule | None = None,
    ) -> None:
        self._plan, self._page_size, self._predictor, self._budget = plan, page_size, predictor, tokens
        self._num_ranks, self._rule = plan.context, rule or ExchangeRule(plan, tokens, page_size)
        self._shards: dict[Sequence, bool] = {}  # each is asked about several times
        self._local, self._replicated, self._sharded = [0] * plan.context, [0] * plan.context, 0
        self._works = work_by_rank(decodes, plan.context, page_size, window=self._rule.window)
        for chunk in decodes:
            self._place(chunk.num_tokens, chunk.ranks, chunk.sharded)
        self._seconds = list(map(predictor.seconds, self._works))
        super().__init__(tokens, self.rows, self.seconds)

    @property
    def rows(self) -> int:
        """Rows of each kind on the rank that has most of it."""
        return -(-self._sharded // self._num_ranks) + max(self._replicated) + max(self._local)

    @property
    def seconds(self) -> float:
        """Predicted seconds of the slowest rank."""
        return max(self._seconds)

    def take(self, sequence: Sequence, count: int) -> None:
        """Add a prompt's next `count` tokens."""
        if count > 0:
            self.take_share(sequence, self.share(sequence, count))

    def take_share(self, sequence: Sequence, share: Share) -> None:
        """Add a share of a prompt."""
        self._add(sequence, share, self._with(sequence, share))

    def fill(self, sequences: Iterable[Sequence]) -> None:
        """Take as much of each as there is room for."""
        for sequence in sequences:
            if self.take_whole(sequence):
                continue
            self.take(sequence, self.largest(sequence))
            if self.is_full:
                return

    def ranks(self, sequence: Sequence) -> tuple[int, ...]:
        """The ranks that compute a prompt's next tokens, as many as a step may have."""
        return self.share(sequence, min(sequence.plannable, self._budget)).ranks

    def has_others(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Whether others can use ranks that a prompt does not."""
        ranks = {*self.ranks(sequence)}
        return len(ranks) < self._num_ranks and any(not ranks.issuperset(self.ranks(other)) for other in others)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether there is room for one token of a prompt at least."""
        return self.room(sequence) > 0 and self._fits(sequence, 1, self.limit)

    def spread(self, sequence: Sequence) -> int:
        """Tokens of a prompt for one row of each rank."""
        return self._num_ranks if self._is_sharded(sequence) else 1

    def context(self, sequence: Sequence) -> int:
        """Tokens that a row of a prompt's next chunk attends to before the chunk, on the rank that has most of them."""
        _, ranks, sharded = self.share(sequence, 1)
        if sharded or len(ranks) == 1:
            return sequence.computed
        return max(keys_by_rank(sequence, sequence.computed, self._page_size))

    def full_seconds(self) -> float:
        """Predicted seconds of a step whose free rows all have tokens without context, on every rank."""
        free = self.tokens - self.rows
        return max(self._predictor.seconds(work.with_chunk(0, free, False)) for work in self._works)

    def seconds_with(self, sequence: Sequence, count: int) -> float:
        """Predicted seconds of the slowest rank with `count` more tokens of a prompt."""
        works = self._with(sequence, self.share(sequence, count)) if count > 0 else []
        return max(self.seconds, *(work.seconds for work in works), 0.0)

    def beside(self, sequence: Sequence, count: int) -> "StepBudget":
        """The same step with a chunk that is not taken yet."""
        other = copy.copy(self)
        for name in ("_local", "_replicated", "_works", "_seconds"):
            setattr(other, name, list(getattr(self, name)))
        other.shares = {}
        other.take(sequence, count)
        other.shares = {}
        return other

    def largest(self, sequence: Sequence, share: float = 1.0) -> int:
        """The most tokens of a prompt for which there is room, in `share` of what the decodes leave of the step."""
        most = min(self.room(sequence), math.ceil(share * self.free_rows) * self.spread(sequence))
        if self.limit == math.inf or most <= 0:
            return max(0, most)
        limit = self._begun + share * (self.limit - self._begun)
        if self._fits(sequence, most, limit):
            return most
        low, high = 0, most  # low fits, high does not
        while high - low > 1:
            count = (low + high) // 2
            low, high = (count, high) if self._fits(sequence, count, limit) else (low, count)
        return self.room(sequence, low)

    def room(self, sequence: Sequence, count: int | None = None) -> int:
        """Rows that there are for a prompt, which needs no more than `count`, or than it may compute now."""
        count = sequence.plannable if count is None else count
        while count > 0:
            _, ranks, sharded = self.share(sequence, count)
            room = self._room(ranks, sharded)
            if room >= count:
                break
            # Fewer may be on fewer ranks, where there is more room.
            fewer = count if sharded else min(count, self._before_growth(sequence))
            count = max(0, room) if room > 0 or fewer == count else fewer
        return count

    def share(self, sequence: Sequence, count: int) -> Share:
        """Return where a prompt's next `count` tokens are computed."""
        if self._is_sharded(sequence):
            return Share(count, tuple(range(self._num_ranks)), True)
        if self._plan.shards_rows and self._plan.placement == "interleave":
            return Share(count, tuple(range(self._num_ranks)), False)  # so a step has no third kind of rows
        placement = sequence.placement
        assert placement is not None
        first, stop = len(sequence.pages), -(-(sequence.computed + count) // self._page_size)
        if stop <= first:
            return Share(count, self._plan.computing_ranks(sequence.ranks), False)
        rank = placement.rank(first)
        if stop == first + 1 or placement.until(first, (rank,)) >= stop:
            ranks = sequence.ranks if rank in sequence.ranks else (*sequence.ranks, rank)
        else:
            new = placement.counts(first, stop)
            ranks = (*{*sequence.ranks, *(rank for rank, pages in enumerate(new) if pages)},)
        return Share(count, self._plan.computing_ranks(tuple(sorted(ranks))), False)

    def take_whole(self, sequence: Sequence) -> bool:
        """Take all of a prompt, if there is room for it."""
        if sequence.plannable < sequence.remaining:
            return False
        share = self.share(sequence, sequence.remaining)
        if self._room(share.ranks, share.sharded) < share.num_tokens:
            return False
        works = self._with(sequence, share)
        if any(work.seconds > self.limit for work in works):
            return False
        self._add(sequence, share, works)
        return True

    def _fits(self, sequence: Sequence, count: int, limit: float) -> bool:
        """Return whether no rank takes longer than `limit` with `count` tokens of a prompt."""
        return all(work.seconds <= limit for work in self._with(sequence, self.share(sequence, count)))

    def _add(self, sequence: Sequence, share: Share, works: list[_RankWork]) -> None:
        self.shares[sequence] = share
        for rank, work, seconds in works:
            self._works[rank], self._seconds[rank] = work, seconds
        self._place(*share)

    @property
    def is_full(self) -> bool:
        """Whether there is room for no row of any kind, on any rank."""
        left = self.tokens - -(-self._sharded // self._num_ranks)
        local = left - max(self._replicated) - min(self._local)
        replicated = left - max(self._local) - min(self._replicated)
        return max(local, replicated, self._room((), True)) <= 0

    def _room(self, ranks: tuple[int, ...], is_sharded: bool) -> int:
        replicated, local, sharded = max(self._replicated), max(self._local), -(-self._sharded // self._num_ranks)
        if is_sharded:
            return self._num_ranks * (self.tokens - replicated - local) - self._sharded
        if len(ranks) == 1:
            return self.tokens - sharded - replicated - self._local[ranks[0]]
        return self.tokens - sharded - local - max(self._replicated[rank] for rank in ranks)

    def _before_growth(self, sequence: Sequence) -> int:
        """Tokens of a prompt that can be computed without pages on one more rank."""
        if sequence.placement is None:
            return sequence.remaining
        number = len(sequence.pages)
        page = sequence.placement.until(number, sequence.ranks or (sequence.placement.rank(number),))
        return int(min(page * self._page_size - sequence.computed, sequence.remaining))

    def _is_sharded(self, sequence: Sequence) -> bool:
        if not self._plan.shards_rows:
            return False
        known = self._shards.get(sequence)
        if known is None:
            known = self._shards[sequence] = self._rule.shards_next(sequence)
        return known

    def _place(self, count: int, ranks: tuple[int, ...], sharded: bool) -> None:
        if sharded:
            self._sharded += count
        elif len(ranks) == 1:
            self._local[ranks[0]] += count
        else:
            place_rows(self._replicated, ranks, count)

    def _with(self, sequence: Sequence, share: Share) -> list[_RankWork]:
        """The work of each rank that computes a share of a prompt, with that share."""
        start, count, ranks = sequence.computed, share.num_tokens, share.ranks
        samples, works, predict = count == sequence.remaining, self._works, self._predictor.seconds
        if share.sharded:
            rows = sharded_rows(count, self._sharded, self._num_ranks)
            # About: chunks of several sequences may have most of their keys on different ranks.
            cached = max(keys_by_rank(sequence, start, self._page_size)) if count > 1 else 0
            names = self._rule.exchanges(count, start, max(self._replicated), max(self._local))
            name = names[0] if len(names) == 1 else ""  # the fastest
            new = [
                works[rank].with_sharded(start, count, self._num_ranks, cached, samples, name, rows) for rank in ranks
            ]
        elif len(ranks) == 1:
            new = [works[ranks[0]].with_chunk(start, count, samples)]
        else:
            starts = [replicated_start(sequence, rank, start, count, self._page_size) for rank in ranks]
            replicated, places = (True, self._rule.rank_window), zip(ranks, starts, strict=True)
            new = [works[rank].with_chunk(here, count, samples, *replicated) for rank, here in places]
        return [_RankWork(rank, work, predict(work)) for rank, work in zip(ranks, new, strict=True)]
