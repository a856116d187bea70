"""The highest rate of requests at which a deployment meets its targets, by search."""

import math
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple

from longctx.simulation.deployment import Deployment
from longctx.simulation.record import Record
from longctx.simulation.targets import Target, Watch
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate
from longctx.simulation.workloads.arrivals import MAX_RATE

PRECISION = 0.05  # the highest rate that meets the targets and the lowest that does not differ by at most this share
_MOST = 24  # rates that are tried


class Tried(NamedTuple):
    """A rate, in requests a second, and whether it meets all targets."""

    rate: float
    is_met: bool


class Capacity(NamedTuple):
    """What a search found.

    Attributes:
      rate: the highest that meets all targets, requests a second; 0: none that was tried does.
      tried: all rates, in their order.
    """

    rate: float
    tried: tuple[Tried, ...]


class _Lost(Exception):
    """A target can't be met any more."""


def find_capacity(
    deployment: Deployment,
    requests: List[WorkloadRequest],
    targets: List[Target],
    seed: int = 0,
    progress: Callable[[Tried], object] | None = None,
) -> Capacity:
    """Search the capacity of a deployment for a workload, whose requests arrive as a Poisson process.

    A workload is finite: a queue that grows without end is not seen to miss a target before it is long enough. So a
    short workload has a higher capacity than a long one.

    Args:
      progress: is called after each rate that was tried.

    Raises:
      ValueError: there is no target, or a request can't be served.
    """
    if not targets:
        raise ValueError("targets must be at least one")

    def is_met(rate: float) -> bool:
        watch = Watch(targets, len(requests))

        def stop(record: Record) -> None:
            if watch.is_lost(record):
                raise _Lost

        try:
            record = deployment.run(arrive_at_rate(requests, rate, seed), seed, progress=stop, keep_steps=False)
        except _Lost:
            return False
        return all(target.is_met_by(record) for target in targets)

    return search(is_met, first_rate(deployment, requests), progress)


def first_rate(deployment: Deployment, requests: List[WorkloadRequest]) -> float:
    """A rate to begin with: half of the one at which prefilling alone would take all time."""
    predictor, budget = deployment.predictor(), deployment.config.token_budget
    seconds = sum(predictor.prefill_seconds(0, request.prompt_tokens, budget) for request in requests)
    return 0.5 * deployment.instances * len(requests) / max(seconds, 1e-9)


def search(is_met: Callable[[float], bool], rate: float, progress: Callable[[Tried], object] | None = None) -> Capacity:
    """Search the highest rate that meets a target: double or halve it until it is bracketed, then bisect by ratio.

    Args:
      is_met: says whether a rate, in requests a second, meets the target.
      rate: to begin with.
      progress: is called after each rate that was tried.

    Returns:
      The highest rate that meets it, within 5 %, and all that were tried.

    Examples:
      >>> from longctx.simulation.capacity import search
      >>> round(search(lambda rate: rate < 3.3, 1.0).rate, 2)
      3.22
    """
    low, high, tried = 0.0, math.inf, list[Tried]()
    while len(tried) < _MOST and rate <= MAX_RATE and not (low > 0 and high <= low * (1 + PRECISION)):
        found = is_met(rate)
        tried.append(Tried(rate, found))
        if progress is not None:
            progress(tried[-1])
        low, high = (rate, high) if found else (low, rate)
        rate = 2 * low if high == math.inf else high / 2 if low == 0 else math.sqrt(low * high)
    return Capacity(low, tuple(tried))
