"""Notes of HTTP requests: a line of the log for each, and counts and seconds for the metrics."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import HistogramMetricFamily, Metric

from longctx.serving.engine.metrics import EngineStats
from longctx.serving.request.output import Metrics
from longctx.serving.server.series import Histogram, counter

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LONGEST = 200  # characters of a path in a line
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


@dataclass
class Usage:
    """Tokens and times of the requests of a call, as far as it has come."""

    prompt_tokens: int = 0
    ended: list[Metrics] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a line."""
        ttft = min((each.ttft for each in self.ended if each.ttft is not None), default=None)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": max((each.cached_tokens for each in self.ended), default=0),
            "output_tokens": sum(each.output_tokens for each in self.ended),
            "ttft": None if ttft is None else round(ttft, 4),
        }


class HttpRequests:
    """Log and metrics of HTTP requests. For the event loop; a scrape reads in another thread.

    Args:
      is_logged: whether each has a line in the log `longctx.access`.
    """

    def __init__(self, is_logged: bool = True) -> None:
        self._is_logged, self._logger = is_logged, logging.getLogger("longctx.access")
        self._logger.setLevel(logging.INFO)
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[str, Histogram] = {}

    def note(
        self, method: str, path: str, route: str | None, status: int, seconds: float, tenant: str, usage: Usage | None
    ) -> None:
        """Note a request that has ended.

        Args:
          route: template of its path, which is a label of metrics; None: there is none.
          seconds: from its head to the last byte of its answer.
        """
        label, method = route or "other", method if method in _METHODS else "other"
        self._counts[method, label, str(status)] += 1
        self._seconds.setdefault(label, Histogram("", _SECONDS)).observe(seconds)
        if not self._is_logged:
            return
        fields = {
            "method": method,
            "path": ascii(path[:_LONGEST])[1:-1],
            "status": status,
            "seconds": round(seconds, 4),
        }
        fields |= {} if usage is None else usage.fields()
        fields |= {"tenant": tenant} if tenant else {}
        self._logger.info("http", extra={"fields": fields})

    def report_load(self, stats: EngineStats, since: EngineStats, seconds: float, num_pages: int) -> None:
        """Log what an engine did since some seconds, if it had anything to do."""
        done = stats.prompt_tokens - since.prompt_tokens, stats.output_tokens - since.output_tokens
        if not self._is_logged or not (any(done) or stats.running or stats.waiting):
            return
        queried = stats.queried_tokens - since.queried_tokens
        fields = {
            "prompt_tokens_per_second": round(done[0] / seconds, 1),
            "output_tokens_per_second": round(done[1] / seconds, 1),
            "running": stats.running,
            "waiting": stats.waiting,
            "pages": f"{stats.pages_held / num_pages:.1%}",
            "found_in_cache": f"{(stats.cached_tokens - since.cached_tokens) / queried:.1%}" if queried else None,
        }
        shown = {name: value for name, value in fields.items() if value is not None}
        self._logger.info("load", extra={"fields": shown})

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics."""
        name = "longctx:http_requests"
        columns = ("method", "path", "status")
        yield counter(name, "HTTP requests that have ended.", {}, dict(self._counts), *columns)
        help = "Seconds from the head of a request to the end of its answer."
        family = HistogramMetricFamily("longctx:http_request_seconds", help, labels=["path"])
        for label, seconds in tuple(self._seconds.items()):
            family.add_metric([label], *seconds.totals())
        yield family
