"""Preemption under optimistic admission: slots and memory go to a decode without a page, or to a more urgent prompt."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as List

from longctx.serving.kv_cache.placement import Grown
from longctx.serving.scheduler.forecast import Forecast
from longctx.serving.scheduler.page_planner import Growth
from longctx.serving.scheduler.policy import Policy, urgency_order
from longctx.serving.scheduler.running import Running
from longctx.serving.scheduler.sequence import Sequence, State


def preemption_key(sequence: Sequence) -> tuple[bool, int, int]:
    """Prompts before decodes, the lowest priority first, then who came last: the largest is preempted first.

    A prompt that was preempted counts as a decode until it has computed what it lost, and as much besides.
    """
    is_prompt = sequence.state is State.PREFILLING and sequence.computed >= sequence.no_preempt_before
    return is_prompt, -sequence.priority, sequence.order


class Preemption:
    """Makes room for decodes, and for prompts that are more urgent than others that run.

    Args:
      preempt: takes slot and pages of a sequence, which goes back to the waiting ones.
    """

    def __init__(
        self,
        running: Running,
        growth: Growth,
        forecast: Forecast,
        policy: Policy,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._running, self._pool, self._growth = running, running.pool, growth
        self._forecast, self._policy, self._preempt = forecast, policy, preempt

    def make_room(self, sequence: Sequence) -> bool:
        """See to it that a decode can have a page; False if it was itself preempted for that.

        No sequence before it is preempted. So the first of the highest priority always goes on, be it a decode or
        a prompt that computes again what it lost: it has all pages, or promises of them.
        """
        rank = self._next_rank(sequence)
        while sequence.reserved[rank] == 0 and self._pool.available(rank) == 0:
            # Promised pages are as good as held ones.
            holders = (s for s in self._running if rank in s.ranks or s.reserved[rank] or s is sequence)
            victim = max(holders, key=preemption_key)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def make_way(
        self,
        sequence: Sequence,
        now: float,
        fits: Callable[[List[Sequence]], bool],
        spared: Collection[Sequence] = (),
    ) -> list[Sequence]:
        """Preempt prompts for a more urgent one, the least urgent first, if that helps. Return those preempted.

        More urgent is who has a higher priority, who comes first by the policy, or who needs less and by the policy may
        share a step of the longer prompt. A prompt of the same priority gives way only if it has more slack than the
        other one even after computing again what it has computed; and none does again before it has computed what it
        lost, and as much besides. So two never take turns at preempting each other, and none computes more than twice
        its prompt again.

        Args:
          fits: whether the sequence has room when some others are preempted.
          spared: who is not preempted.

        Source: Medha, 4.2: prompts give way to more urgent ones, decodes are never interrupted.
        """
        others = [other for other in self._running.prefilling if other is not sequence and other not in spared]
        others = [other for other in others if self._gives_way(other, sequence, now)]
        others.sort(key=lambda other: (urgency_order(self._policy, other, now), other.order), reverse=True)
        victims: list[Sequence] = []
        for other in others:
            victims.append(other)
            if fits(victims):
                break
        else:
            return []
        for other in victims[-2::-1]:  # without whom it fits as well
            fewer = [victim for victim in victims if victim is not other]
            victims = fewer if fits(fewer) else victims
        for victim in victims:
            self._preempt(victim)
        return victims

    def _gives_way(self, victim: Sequence, sequence: Sequence, now: float) -> bool:
        """Whether a prompt may be preempted for another one, see `make_way`."""
        if victim.computed < victim.no_preempt_before or victim.priority > sequence.priority:
            return False
        if victim.priority < sequence.priority:
            return True
        needs_less = sequence.prefill_remaining < victim.prefill_remaining
        may_share = needs_less and self._policy.share(sequence, now) > 0
        if not may_share and self._policy.urgency(sequence, now) >= self._policy.urgency(victim, now):
            return False
        slack, other = (s.deadline - now - s.prefill_remaining for s in (victim, sequence))
        return slack - self._forecast.time.prefill_seconds(0, victim.computed, victim.tpot_target) > other

    def _next_rank(self, sequence: Sequence) -> int:
        """The rank of its next page: as placed, or where it grows to."""
        number, placement = len(sequence.pages), sequence.placement
        assert placement is not None
        rank = placement.rank(number)
        if sequence.reserved[rank] or not isinstance(placement, Grown):
            return rank
        run = self._growth.next_run(sequence, 1)
        if run is not None and run[0] != rank:
            rank = run[0]
            sequence.placement = Grown(placement.num_ranks, [run for run in placement.runs if run[0] < number])
            sequence.placement.grow(number, rank)
        return rank
