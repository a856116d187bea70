"""Metrics of a router in Prometheus's text form.

Metrics that an engine's server has too have the same names here. Those of a cluster alone are `longctx:cluster_...`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.request import Assignment, ClusterRequest
from longctx.cluster.prefix_index.index import TIERS
from longctx.cluster.router.instances import Instances
from longctx.serving.request.output import FinishReason, Output
from longctx.serving.request.request import Request
from longctx.serving.server import series
from longctx.serving.server.series import (
    Histogram,
    RenderedMetrics,
    counter,
    gauge,
    one_two_five,
)
from longctx.serving.server.settings import check_prefix

PREFIX = "longctx:cluster_"
_VIEWS = (
    ("queue_seconds", "Predicted seconds of the prompts that an instance has to read."),
    ("decoding", "Requests that decode on an instance."),
    ("decode_tokens", "Tokens of the contexts of these."),
    ("reserved_tokens", "Tokens of KV cache that are kept for an instance's requests."),
    ("capacity_tokens", "Tokens of KV cache that an instance has room for."),
    ("tbt", "Predicted seconds between tokens on an instance."),
    ("sending_seconds", "Predicted seconds until an instance has sent what others fetch."),
    ("open_requests", "Requests that an instance has a part in."),
)
_NAMES = {"decoding": "decoding_requests", "tbt": "tbt_seconds"}
_RATIO = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10, 100)
_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
    "moved": "moved",
}


class RouterMetrics(RenderedMetrics):
    """Metrics of a router: counts, written in the event loop, and what instances and conductor say at a scrape.

    Args:
      prefix: of the metrics that vLLM has too.
      max_length: of prompts and answers, in tokens.

    Attributes:
      assignments: by (prefill instance, decode instance).
      transfers: prefixes that were sent, by (source, prefill instance).
      prompt_tokens, cached_tokens: of what was assigned: of prompts, and of those what is in a cache, by prediction.
      rejections: of which clients were told, by (bound, stage).
      failures: by (instance, why): `"refused"`, `"broken"`, `"nonsense"`.
      refusals: answers to clients, by reason.
      retries: requests that went on elsewhere.
      ends: completions, by reason.
      ended_prompt_tokens, output_tokens: of completions; those that clients have had.
      histograms: of durations as clients see them, by the names of their metrics.
      ttft_ratio: time to first token over that predicted.
      requests: returns how many requests run, and how many wait.

    Raises:
      ValueError: prefix is no name of letters, digits and underscores.
    """

    def __init__(
        self, prefix: str, model_name: str, conductor: Conductor, instances: Instances, max_length: int
    ) -> None:
        self._prefix, self._conductor, self._instances = check_prefix(prefix), conductor, instances
        self._labels = {"model_name": model_name, "engine": "cluster"}
        self.requests: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.assignments: Counter[tuple[str, str]] = Counter()
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.rejections: Counter[tuple[str, str]] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.ends = Counter(dict.fromkeys(_REASONS.values(), 0))
        self.prompt_tokens = self.cached_tokens = self.ended_prompt_tokens = self.output_tokens = 0
        self.retries = self.role_changes = self.swapped_blocks = 0
        lengths = one_two_five(max_length)
        self.histograms = {
            "time_to_first_token_seconds": Histogram("Seconds from arrival to the first token.", series.TTFT),
            "inter_token_latency_seconds": Histogram("Seconds from a token to the next one.", series.GAP),
            "request_time_per_output_token_seconds": Histogram("Mean seconds of a request's later tokens.", series.GAP),
            "e2e_request_latency_seconds": Histogram("Seconds from arrival to the end.", series.DURATION),
            "request_prompt_tokens": Histogram("Tokens of a request's prompt.", lengths),
            "request_generation_tokens": Histogram("Tokens of a completion.", lengths),
        }
        self.ttft_ratio = Histogram("Time to the first token over that predicted.", _RATIO)
        self._register()

    def note_assignment(self, assignment: Assignment, request: ClusterRequest, is_again: bool) -> None:
        """Count a request that was placed; `is_again`: not for the first time."""
        self.assignments[assignment.prefill, assignment.decode] += 1
        if assignment.transfer is not None:
            self.transfers[assignment.transfer.source, assignment.prefill] += 1
        if not is_again:
            self.prompt_tokens += request.prompt_tokens
            self.cached_tokens += assignment.cached

    def note_first(self, seconds: float, predicted: float | None) -> None:
        """Observe a TTFT; `predicted`: by the conductor, None if the request was placed several times."""
        self.histograms["time_to_first_token_seconds"].observe(seconds)
        if predicted:
            self.ttft_ratio.observe(seconds / predicted)

    def note_end(self, output: Output, request: Request) -> None:
        """Count a completion that has ended."""
        metrics, seen = output.metrics, self.histograms
        self.ends[_REASONS[output.finish_reason]] += 1
        self.ended_prompt_tokens += metrics.prompt_tokens
        seen["request_prompt_tokens"].observe(metrics.prompt_tokens)
        seen["request_generation_tokens"].observe(metrics.output_tokens)
        if metrics.finished is not None:
            seen["e2e_request_latency_seconds"].observe(metrics.finished - metrics.arrival)
        if metrics.first_token is not None and metrics.last_token is not None and metrics.output_tokens > 1:
            mean = (metrics.last_token - metrics.first_token) / (metrics.output_tokens - 1)
            seen["request_time_per_output_token_seconds"].observe(mean)

    def observe_refusal(self, reason: str) -> None:
        """Count a refused request; in the event loop's thread."""
        self.refusals[reason] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all families, for `prometheus_client`."""
        yield from self.more()
        yield from self._of_clients()
        yield from self._of_instances()
        yield from self._of_decisions()

    def _of_clients(self) -> Iterator[Metric]:
        """Yield metrics that an engine's server has too."""
        prefix, labels = f"{self._prefix}:", self._labels
        running, waiting = self.requests()
        loads = [each.load.token_usage for each in self._instances if each.load is not None]
        usage = sum(loads) / len(loads) if loads else 0.0
        yield gauge(prefix + "num_requests_running", "Requests that have had a token.", labels, running)
        yield gauge(prefix + "num_requests_waiting", "Requests that have had none.", labels, waiting)
        yield gauge(prefix + "kv_cache_usage_perc", "Mean share of instances' pages that are held.", labels, usage)
        for name, help, value in (
            ("prefix_cache_queries", "Tokens of prompts that were placed.", self.prompt_tokens),
            ("prefix_cache_hits", "Tokens of them that an instance had, by KV events.", self.cached_tokens),
            ("prompt_tokens", "Tokens of prompts of completions that ended.", self.ended_prompt_tokens),
            ("generation_tokens", "Tokens that clients have had.", self.output_tokens),
        ):
            yield counter(prefix + name, help, labels, value)
        ends = dict(self.ends)
        yield counter(prefix + "request_success", "Completions that ended.", labels, ends, "finished_reason")
        for name, histogram in self.histograms.items():
            yield histogram.family(prefix + name, labels)
        refused = "Requests refused."
        yield counter("longctx:requests_refused", refused, labels, dict(self.refusals), "reason")

    def _of_instances(self) -> Iterator[Metric]:
        labels, index = self._labels, self._conductor.index
        states = Counter((each.role, each.state) for each in self._instances)
        yield gauge(PREFIX + "instances", "Instances.", labels, states, "role", "state")
        now = time.monotonic()
        up = {(each.name, each.role): float(each.state == "open") for each in self._instances}
        yield gauge(PREFIX + "instance_up", "Whether it takes requests.", labels, up, "instance", "role")
        views = self._conductor.instances(now)
        for name, help in _VIEWS:
            values = {view.name: float(getattr(view, name)) for view in views}
            yield gauge(f"{PREFIX}instance_{_NAMES.get(name, name)}", help, labels, values, "instance")
        blocks: dict[tuple[str, ...], float] = {}
        for view in views:
            for tier in TIERS:
                blocks[view.name, tier] = index.blocks(view.name, tier)
        help = "Blocks that an instance has, by its KV events."
        yield gauge(PREFIX + "instance_blocks", help, labels, blocks, "instance", "tier")
        yield gauge(PREFIX + "indexed_blocks", "Distinct blocks that somebody has.", labels, index.num_blocks)
        yield gauge(PREFIX + "index_bytes", "Memory of the index of blocks.", labels, index.num_bytes)
        loads = self._conductor.loads(now)._asdict()
        yield gauge(PREFIX + "load", "Predicted time over its SLO, of a pool.", labels, loads, "pool")

    def _of_decisions(self) -> Iterator[Metric]:
        labels, policy = self._labels, self._conductor.policy_name
        placed: Counter[tuple[str, ...]] = Counter()
        for (prefill, decode), count in tuple(self.assignments.items()):
            placed[policy, "prefill", prefill] += count
            placed[policy, "decode", decode] += count
        help, columns = "Requests that were placed on an instance.", ("policy", "stage", "instance")
        yield counter(PREFIX + "assignments", help, labels, placed, *columns)
        help = "Prefixes that one instance sent another before its prefill."
        yield counter(PREFIX + "transfers", help, labels, self.transfers, "source", "instance")
        help = "Requests that were rejected, by what binds and before which stage."
        yield counter(PREFIX + "rejections", help, labels, self.rejections, "bound", "stage")
        help = "Requests that an instance did not bring to their end."
        yield counter(PREFIX + "failures", help, labels, self.failures, "instance", "reason")
        for name, help, count in (
            ("retries", "How often a request went on elsewhere.", self.retries),
            ("role_changes", "Roles of instances that were changed by load.", self.role_changes),
            ("swapped_blocks", "Cold blocks that instances were told to take out of a tier.", self.swapped_blocks),
        ):
            yield counter(PREFIX + name, help, labels, count)
        yield self.ttft_ratio.family(PREFIX + "ttft_over_predicted", labels)
