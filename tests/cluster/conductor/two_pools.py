"""A tiny cluster in virtual time: prompts are computed in order, answers take as long as they are told to."""

import heapq
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.overload import Loads
from longctx.cluster.conductor.request import Assignment, ClusterRequest, Rejection


class Sample(NamedTuple):
    """What is seen each second."""

    at: float
    loads: Loads


class TwoPools:
    """Drives a conductor: every instance does exactly as was predicted.

    Args:
      decode_seconds: what the answer of a request takes, by its number.

    Attributes:
      rejections: of both stages, in order.
      completed: ids of requests that have ended.
      samples: the loads of both pools, each second.
    """

    def __init__(self, conductor: Conductor, decode_seconds: Callable[[int], float]) -> None:
        self.conductor, self._decode_seconds = conductor, decode_seconds
        self.rejections: list[Rejection] = []
        self.completed: list[str] = []
        self.samples: list[Sample] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._free_at: defaultdict[str, float] = defaultdict(float)
        self._order = 0

    def run(self, arrivals: list[tuple[float, ClusterRequest]], until: float) -> None:
        """Serve requests that come at given times, and look at the loads each second."""
        for number, (at, request) in enumerate(arrivals):
            self.plan(at, lambda now, number=number, request=request: self.arrive(number, request, now))
        for second in range(int(until)):
            self.plan(second + 0.5, self._sample)
        while self._events and self._events[0][0] <= until:
            now, _, action = heapq.heappop(self._events)
            action(now)

    def plan(self, at: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, action))

    def arrive(self, number: int, request: ClusterRequest, now: float) -> None:
        decision = self.conductor.assign(request, now)
        if isinstance(decision, Rejection):
            self.rejections.append(decision)
            return
        end = max(now + decision.transfer_seconds, self._free_at[decision.prefill]) + decision.prefill_seconds
        self._free_at[decision.prefill] = end
        self.plan(end, lambda now: self._prefilled(number, decision, now))

    def _prefilled(self, number: int, assignment: Assignment, now: float) -> None:
        rejection = self.conductor.prefilled(assignment.request_id, now)
        if rejection is not None:
            self.rejections.append(rejection)
        else:
            self.plan(now + self._decode_seconds(number), lambda now: self._finished(assignment, now))

    def _finished(self, assignment: Assignment, now: float) -> None:
        self.conductor.finished(assignment.request_id, now)
        self.completed.append(assignment.request_id)

    def _sample(self, now: float) -> None:
        self.samples.append(Sample(now, self.conductor.loads(now)))
