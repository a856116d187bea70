"""Targets of latency that a workload is to meet, such as `ttft_p90=30,in_time=0.95`."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from longctx.simulation.record import Record, Served

LATENCIES = ("ttft", "tpot", "e2e")
_LATENCY = re.compile(rf"({'|'.join(LATENCIES)})_p(\d{{1,2}}(?:\.\d+)?)")


def in_time(served: Served) -> bool | None:
    """Whether a request that has ended kept what it was promised, first token and TPOT; None: nothing was promised."""
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
    """A share of requests whose latency is at most so many seconds.

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
        """Whether a request meets it; None: it has no such latency or promise."""
        if self.name == "in_time":
            return in_time(served)
        value = latency(served, self.name)
        return None if value is None else value <= self.seconds

    def is_met_by(self, record: Record) -> bool:
        """Whether a record meets it; requests that have not ended don't."""
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
        """Whether some target can't be met any more."""
        for served in record.served[self._seen :]:
            for at, target in enumerate(self._targets):
                self._missed[at] += target.is_met(served) is False
        self._seen = len(record.served)
        return any(missed > allowed for missed, allowed in zip(self._missed, self._allowed, strict=True))
