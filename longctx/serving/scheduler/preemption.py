"""Who gives memory back when a decode finds no page (optimistic admission)."""

from collections.abc import Callable

from longctx.serving.kv_cache.placement import Grown, Placer
from longctx.serving.scheduler.running import Running
from longctx.serving.scheduler.sequence import Sequence, State


def dispensability(sequence: Sequence) -> tuple[bool, int, int]:
    """Prompts before decodes, the lowest priority first, then who came last: the largest is preempted first."""
    return sequence.state is State.PREFILLING, -sequence.priority, sequence.order


class Preemption:
    """Makes room for decodes.

    Args:
      preempt: takes slot and pages of a sequence, which goes back to the waiting ones.
    """

    def __init__(self, running: Running, placer: Placer, preempt: Callable[[Sequence], None]) -> None:
        self._running, self._pool, self._placer, self._preempt = running, running.pool, placer, preempt

    def make_room(self, sequence: Sequence) -> bool:
        """See to it that a decode can have a page; False if it was itself preempted for that.

        Nobody who comes before it is preempted: the first decode of the highest priority always goes on.
        """
        rank = self._next_rank(sequence)
        while sequence.reserved[rank] == 0 and self._pool.available(rank) == 0:
            # Promised pages are as good as held ones.
            holders = (s for s in self._running if rank in s.ranks or s.reserved[rank] or s is sequence)
            victim = max(holders, key=dispensability)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _next_rank(self, sequence: Sequence) -> int:
        """The rank of its next page: as placed, or if memory is short there, one that has some."""
        number, placement, pool = len(sequence.pages), sequence.placement, self._pool
        assert placement is not None
        rank = placement.rank(number)
        if sequence.reserved[rank] or not isinstance(placement, Grown):
            return rank
        if pool.available(rank) and placement.counts(0, number)[rank] < self._placer.limit:
            return rank
        others = [other for other in range(pool.num_ranks) if other != rank and pool.available(other)]
        if others:
            rank = min(others, key=lambda other: (other in sequence.ranks, -pool.available(other)))
            sequence.placement = Grown(placement.num_ranks, [run for run in placement.runs if run[0] < number])
            sequence.placement.grow(number, rank)
        return rank
