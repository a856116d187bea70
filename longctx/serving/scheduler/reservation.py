"""Memory that is reserved for a sequence without room, and the predicted ends by which others may pass it.

Source: EASY backfilling of batch schedulers (Lifka 1995; Mu'alem and Feitelson 2001), with pages instead of nodes.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import accumulate

from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.scheduler.sequence import Sequence

# Of the pages, what a reservation leaves for those that stay. With none, a reservation that takes just what comes back
# would keep every short prompt with a long answer waiting; with it, the sequence may wait for one more end.
_SPARE = 1 / 32


class PredictedEnds:
    """Predicts when sequences return their pages: prompts take turns, and all max_tokens are sampled.

    Args:
      prompts: (order, seconds) of the prompts that are read: the least order comes first.
      shares: prompts share steps, so that a short one does not wait for the whole of a longer one before it.
      token_seconds: between two tokens of a sequence.
    """

    def __init__(
        self, prompts: Iterable[tuple[tuple[float, float], float]], shares: bool, token_seconds: float, now: float
    ) -> None:
        by_order = sorted(prompts)
        self._orders = [order for order, _ in by_order]
        self._before = [0.0, *accumulate(seconds for _, seconds in by_order)]
        self._seconds = sorted(seconds for _, seconds in by_order) if shares else []
        self._shorter = [0.0, *accumulate(self._seconds)]
        self._shares, self.token_seconds, self._now = shares, token_seconds, now

    def decode_end(self, sequence: Sequence) -> float:
        """When a sequence ends whose prompt has been read."""
        tokens = sequence.prompt_length + sequence.max_tokens - sequence.length
        return self._now + tokens * self.token_seconds

    def end(self, sequence: Sequence, order: tuple[float, float]) -> float:
        """When a sequence ends that is read, or would be: after the prompts before it, or in turns with all.

        In turns, each of the others has had as much time as this one when it ends, or all that it needs.
        """
        seconds = sequence.prefill_remaining
        ahead = self._before[bisect_left(self._orders, order)]
        if self._shares:
            shorter = bisect_left(self._seconds, seconds)
            ahead = min(ahead, self._shorter[shorter] + seconds * (len(self._seconds) - shorter))
        return self.decode_end(sequence) + seconds + ahead


class Reservation:
    """Memory for a sequence without room: enough pages, at the time when they have come back by prediction.

    Of those that run, some have passed it. These don't put the reservation off, however wrong predictions are: neither
    the time nor what is left by then rests on when they end. So a sequence waits at most until all that run beside it
    when it is blocked have ended, and then for those that were to have ended by then.

    Attributes:
      time: when enough of the others will have returned their pages, and a small share besides; `-inf` if they have,
        and only sequences that were to return theirs by now hold what is missing.
      surplus: pages of each rank that are left then; of all ranks together where sequences grow.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.needs = list[int]()
        self.time, self.surplus = -math.inf, list[int]()
        # Those that have passed: some return their pages by the time of the reservation, others it does not need.
        self._returning, self._staying = set[Sequence](), set[Sequence]()

    def update(
        self, pool: PagePool, needs: list[int], others: Iterable[tuple[Sequence, float]], in_all: bool, margin: int
    ) -> None:
        """Find time and surplus anew.

        Args:
          needs: pages of each rank, or in all, that must be there.
          others: sequences that run, with their predicted ends.
          in_all: pages of all ranks are counted together.
          margin: pages of each rank, or in all, that are not available though they are free.
        """
        self.needs = needs
        returning, staying = set[Sequence](), set[Sequence]()
        back, left = list[Sequence](), list[tuple[float, int, Sequence]]()
        for other, end in others:
            if other in self._returning:
                returning.add(other)
                back.append(other)
            elif other in self._staying:
                staying.add(other)
            elif other is not self.sequence:
                left.append((end, other.order, other))
        self._returning, self._staying = returning, staying
        free = [pool.num_available] if in_all else pool.by_rank
        claims = sum(other.claim for other in staying)
        self.surplus = [pages - need - margin - claims for pages, need in zip(free, self.needs, strict=True)]
        for other in back:
            self._return(pool, other, in_all)
        self.time = -math.inf
        for end, _, other in sorted(left):
            if min(self.surplus) >= _SPARE * (pool.num_pages if in_all else pool.per_rank):
                break
            self._return(pool, other, in_all)
            self.time = end

    def allows(self, pages: List[int], end: float) -> bool:
        """Whether a sequence that takes so many pages until `end` may pass."""
        return end <= self.time or all(count <= left for count, left in zip(pages, self.surplus, strict=True))

    def pass_by(self, other: Sequence, pages: List[int], end: float) -> None:
        """Let another sequence pass."""
        if end <= self.time:
            self._returning.add(other)
        else:
            self._staying.add(other)
            self.surplus = [left - count for count, left in zip(pages, self.surplus, strict=True)]

    def _return(self, pool: PagePool, other: Sequence, in_all: bool) -> None:
        pages = [x + y for x, y in zip(pool.alone(other.order), other.reserved, strict=True)]
        pages = [sum(pages) + other.promised] if in_all else pages
        self.surplus = [left + count for left, count in zip(self.surplus, pages, strict=True)]
