"""Promises pages to sequences that grow from rank to rank, so that each can get all that it may still need.

A sequence that is longer than its limit on a rank begins with promises of one rank's pages, and gets the next rank's
when it reaches them. Pages of any rank serve it, so memory is one resource, and sequences that grow beside each other
could each hold what the other needs. They can't: promises are made only if afterwards there is an order in which all
running sequences can end, each with what those before it give back (Dijkstra's banker's algorithm).

Under `admission="reserve"` a sequence may need pages for its prompt and max_tokens, and is promised all of them before
its prompt ends: decodes never wait. Under `"optimistic"` it may need those of its prompt.

Source: growth, Mnemosyne 4.4; the choice of the rank when it is needed, Medha 4.3; Dijkstra 1965, EWD 123.
"""

from collections.abc import Collection
from collections.abc import Sequence as List
from typing import NamedTuple

from longctx.serving.kv_cache.placement import Need, Placer
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.running import Running
from longctx.serving.scheduler.sequence import Sequence


class Claim(NamedTuple):
    """`needs`: pages that a sequence may still need. `gives`: those that it gives back besides these when it ends."""

    needs: int
    gives: int


def grantable(needs: int, free: int, others: List[Claim], rest: int) -> int:
    """Return how many of the pages that a sequence needs can be promised now so that all sequences can still end.

    Args:
      free: pages that are available.
      others: other sequences that need pages.
      rest: pages that sequences give back which need none.
    """
    grant = min(needs, free)
    if needs <= free:
        return max(0, grant)  # when it has ended, the others can end as they could before
    free += rest
    for other in sorted(others):
        if needs <= free:
            break
        grant = min(grant, free - other.needs)
        free += other.gives
    return max(0, grant) if needs <= free else 0


class Growth:
    """Assigns pages of ranks to sequences that grow.

    Args:
      rows: tokens of one prompt in a step, at most.
    """

    def __init__(self, running: Running, placer: Placer, forecast: Forecast, rows: int, optimistic: bool) -> None:
        self._running, self._pool, self._placer, self._forecast = running, running.pool, placer, forecast
        self._rows, self._optimistic = rows, optimistic

    def rank_load(self) -> list[float]:
        """Seconds of prompts that each rank has to compute."""
        return self._forecast.rank_load(self._running.prefilling)

    def limit(self, sequence: Sequence) -> int:
        """Pages that a sequence has on one rank, at most, if others have room."""
        return int(min(self._placer.limit(sequence.tpot_target), self._pool.per_rank))

    def grantable(
        self, sequence: Sequence, needs: int, free: int, shared: int = 0, without: Collection[Sequence] = ()
    ) -> int:
        """Return how many of the pages that a sequence needs can be promised to it now, see `grantable`.

        Args:
          shared: pages that it would share with one other, which gives them back only when both have ended.
          without: sequences that would be preempted; `free` has what they give back.
        """
        rest, others = self._pool.num_alone + self._pool.num_reserved - shared, []
        for other in self._running:
            if other is sequence or other.claim or other in without:
                rest -= (gives := self.gives(other))
                if other is not sequence and other not in without:
                    others.append(Claim(other.claim, gives))
        return grantable(needs, free, others, rest)

    def gives(self, sequence: Sequence) -> int:
        """Pages that a running sequence gives back when it ends, of those that it has or is promised."""
        return sum(self._pool.alone(sequence.order)) + sum(sequence.reserved) + sequence.promised

    def is_due(self, sequence: Sequence) -> bool:
        """Whether a prompt needs promises for the next step."""
        return sequence.claim > 0 and sequence.plannable < min(sequence.remaining, self._rows)

    def grow(self, sequence: Sequence) -> bool:
        """Promise a prompt what it needs in the next step; False if it must wait for some of it."""
        while sequence.claim and sequence.reach < sequence.computed + min(sequence.remaining, self._rows):
            if not self._promise_run(sequence):
                return False
        if not self.is_due(sequence):
            return True
        if self._free() < sequence.claim:
            return False
        self._running.promise_rest(sequence)
        return True

    def needs(self, sequence: Sequence) -> int:
        """Pages that a prompt lacks for the next step."""
        tokens = sequence.computed + min(sequence.remaining, self._rows) - sequence.reach
        return min(max(1, self._running.pages_of(int(tokens))), sequence.claim)

    def could_grow(self, sequence: Sequence, without: Collection[Sequence]) -> bool:
        """Whether a prompt would get what it needs in the next step, if others were preempted."""
        free = self._free() + sum(map(self.gives, without))
        return self.grantable(sequence, sequence.claim, free, without=without) >= self.needs(sequence)

    def place_promised(self, sequence: Sequence) -> None:
        """Choose the rank of a decode's next pages, which it is promised."""
        is_there = self._promise_run(sequence)
        assert is_there, "a page that was promised is not there"

    def _promise_run(self, sequence: Sequence) -> bool:
        grant = sequence.promised or self.grantable(sequence, sequence.claim, self._free())
        run = self.next_run(sequence, grant) if grant else None
        if run is not None:
            self._running.promise_run(sequence, *run)
        return run is not None

    def next_run(self, sequence: Sequence, count: int) -> tuple[int, int] | None:
        """Return rank and number of up to `count` pages that follow those a running sequence has or is promised."""
        held = tuple(a + b for a, b in zip(sequence.rank_pages, sequence.reserved, strict=True))
        stop = sum(held)
        assert sequence.placement is not None
        need = Need(stop, stop + count, held, sequence.placement.rank(stop))
        return self._placer.next_run(need, self._pool.by_rank, self.rank_load, self.limit(sequence))

    def _free(self) -> int:
        """Pages that can be promised to those that grow."""
        # Nothing is promised to optimistic decodes: they shall not preempt at once who grows.
        return self._pool.num_available - self._optimistic * len(self._running.decoding)
