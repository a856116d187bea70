"""Targets of latency, such as `ttft_p90=30,in_time=0.95`, and the highest rate of requests at which they are met."""

import math
import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

from longctx.simulation.deployment import Deployment
from longctx.simulation.record import Record, Served
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate
from longctx.simulation.workloads.arrivals import MAX_RATE

LATENCIES = ("ttft", "tpot", "e2e")
_LATENCY = re.compile(rf"({'|'.join(LATENCIES)})_p(\d{{1,2}}(?:\.\d+)?)")
PRECISION = 0.05  # the highest rate that meets the targets and the lowest that does not differ by at most this share
_MOST = 24  # rates that are tried


def in_time(served: Served) -> bool | None:
    """Check that a request that has ended kept its limits of first token and TPOT; None: it has none."""
    kept = [x for x in (served.kept_ttft, served.metrics.kept_tpot) if x is not None]
    return all(kept) if kept else None


def latency(served: Served, name: str) -> float | None:
    """Seconds: `ttft` from when it was due, `tpot` per token, `e2e` from when it was due to its last token."""
    if name == "ttft":
        return served.ttft
    if name == "tpot":
        return served.tpot
    assert served.metrics.finished is not None
    assert served.metrics.first_token is not None
    return served.ttft + served.metrics.finished - served.metrics.first_token


@dataclass(frozen=True)
class Target:
    """A share of requests whose latency is at most `seconds`.

    Attributes:
      name: `"ttft"`, `"tpot"`, `"e2e"`, or `"in_time"`: what each request was promised.
      share: of requests, above 0 and at most 1.
      seconds: at most, infinite for `"in_time"`.
    """

    name: str
    share: float
    seconds: float = math.inf

    def __str__(self) -> str:
        if self.name == "in_time":
            return f"in_time={self.share:g}"
        return f"{self.name}_p{100 * self.share:g}={self.seconds:g}"

    def is_met(self, served: Served) -> bool | None:
        """Check that a request meets it; None: it has no such latency or limit."""
        if self.name == "in_time":
            return in_time(served)
        value = latency(served, self.name)
        return None if value is None else value <= self.seconds

    def is_met_by(self, record: Record) -> bool:
        """Check that a record meets it; requests that have not ended don't."""
        if self.name == "in_time":
            met = [self.is_met(served) for served in record.served]
            known = sum(x is not None for x in met) + len(record.open)
            return known > 0 and sum(x is True for x in met) >= self.share * known
        values = [value for served in record.served if (value := latency(served, self.name)) is not None]
        values += [math.inf] * len(record.open)
        return bool(values) and _percentile(sorted(values), self.share) <= self.seconds


def _percentile(values: list[float], share: float) -> float:
    """As numpy's, of ascending values of which some may be infinite."""
    at, part = divmod(share * (len(values) - 1), 1)
    low = values[int(at)]
    return low if part == 0 else low + part * (values[int(at) + 1] - low) if low < math.inf else low


def parse_targets(text: str) -> list[Target]:
    """Parse `ttft_pP=SECONDS`, `tpot_pP=SECONDS`, `e2e_pP=SECONDS` and `in_time=SHARE` with commas between them.

    Raises:
      ValueError: the text has another form, or a number is out of range.
    """
    return [_parse(part) for part in text.split(",")]


def _parse(text: str) -> Target:
    form = f"must be ttft_p90=SECONDS, tpot_p99=SECONDS, e2e_p50=SECONDS or in_time=SHARE, got {text!r}"
    name, equals, number = text.strip().partition("=")
    match = _LATENCY.fullmatch(name)
    try:
        value = float(number)
    except ValueError:
        raise ValueError(form) from None
    if not equals or (match is None and name != "in_time"):
        raise ValueError(form)
    if not (0 < value < math.inf) or (match is None and value > 1):
        raise ValueError(f"must have positive seconds, and a share of at most 1, got {text!r}")
    if match is None:
        return Target("in_time", value)
    if float(match[2]) == 0:
        raise ValueError(f"must have a percentile above 0, got {text!r}")
    return Target(match[1], float(match[2]) / 100, value)


class Watch:
    """Counts, while a workload runs, the requests that miss targets, so that one that cannot be met ends early."""

    def __init__(self, targets: Iterable[Target], num_requests: int) -> None:
        self._targets = list(targets)
        # With more that miss it, also the smaller of the two values is too large that a percentile is between; requests
        # without such a latency make that earlier.
        self._allowed = [num_requests - math.floor((num_requests - 1) * target.share) for target in self._targets]
        self._missed = [0] * len(self._targets)
        self._seen = 0

    def is_lost(self, record: Record) -> bool:
        """Check whether some target can't be met any more."""
        for served in record.served[self._seen :]:
            for at, target in enumerate(self._targets):
                self._missed[at] += target.is_met(served) is False
        self._seen = len(record.served)
        return any(missed > allowed for missed, allowed in zip(self._missed, self._allowed, strict=True))


class Tried(NamedTuple):
    """A rate, in requests a second, and whether it meets all targets."""

    rate: float
    is_met: bool


class Capacity(NamedTuple):
    """Result of a search.

    Attributes:
      rate: the highest that meets all targets, requests a second; 0: none that was tried does.
      tried: all rates, in their order.
    """

    rate: float
    tried: tuple[Tried, ...]


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
        watch, arriving = Watch(targets, len(requests)), arrive_at_rate(requests, rate, seed)
        record = deployment.simulation().run(arriving, seed, progress=watch.is_lost, keep_steps=False)
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
