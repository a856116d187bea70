"""`RouterMetrics`: what a router does, in Prometheus's text form.

What an engine's server tells, too, has the names that it has there. What only a cluster has is `longctx:cluster_...`.
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from longctx.cluster.prefix_index.index import TIERS
from longctx.serving.server.rendered_metrics import RenderedMetrics, check_prefix
from longctx.serving.server.series import counter, counters, gauge, gauges, table

if TYPE_CHECKING:
    from longctx.cluster.router.server import RouterServer

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


class RouterMetrics(RenderedMetrics):
    """Renders what a router counts.

    Args:
      prefix: of the metrics that vLLM has too.

    Raises:
      ValueError: prefix is no name of letters, digits and underscores.
    """

    def __init__(self, prefix: str, server: "RouterServer") -> None:
        self._prefix, self._server = check_prefix(prefix), server
        self._labels = {"model_name": server.model_name, "engine": "cluster"}
        self._register()

    def observe_refusal(self, reason: str) -> None:
        """A request was refused; in the event loop's thread."""
        self._server.cluster.stats.refusals[reason] += 1

    def collect(self) -> Iterator[Metric]:
        """All families, for `prometheus_client`."""
        yield from self._of_clients()
        yield from self._of_instances()
        yield from self._of_decisions()

    def _of_clients(self) -> Iterator[Metric]:
        """What an engine's server tells, too."""
        prefix, labels, cluster = f"{self._prefix}:", self._labels, self._server.cluster
        stats = cluster.stats
        running = cluster.num_running
        waiting = cluster.num_requests - running
        loads = [each.load.token_usage for each in self._server.instances if each.load is not None]
        usage = sum(loads) / len(loads) if loads else 0.0
        yield gauge(prefix + "num_requests_running", "Requests that have had a token.", labels, running)
        yield gauge(prefix + "num_requests_waiting", "Requests that have had none.", labels, waiting)
        yield gauge(prefix + "kv_cache_usage_perc", "Mean share of instances' pages that are held.", labels, usage)
        for name, help, value in (
            ("prefix_cache_queries", "Tokens of prompts that were placed.", stats.prompt_tokens),
            ("prefix_cache_hits", "Tokens of them that an instance had, by KV events.", stats.cached_tokens),
            ("prompt_tokens", "Tokens of prompts of completions that ended.", stats.ended_prompt_tokens),
            ("generation_tokens", "Tokens that clients have had.", stats.output_tokens),
        ):
            yield counter(prefix + name, help, labels, value)
        ends = dict(stats.ends)
        yield counters(prefix + "request_success", "Completions that ended.", labels, "finished_reason", ends)
        for name, histogram in stats.histograms.items():
            yield histogram.family(prefix + name, labels)
        refused = "Requests refused."
        yield counters("longctx:requests_refused", refused, labels, "reason", dict(stats.refusals))

    def _of_instances(self) -> Iterator[Metric]:
        labels, server = self._labels, self._server
        states = Counter((each.role, each.state) for each in server.instances)
        yield table(GaugeMetricFamily, PREFIX + "instances", "Instances.", labels, ("role", "state"), states)
        now = time.monotonic()
        up = {(each.name, each.role): float(each.state == "open") for each in server.instances}
        yield table(
            GaugeMetricFamily, PREFIX + "instance_up", "Whether it takes requests.", labels, ("instance", "role"), up
        )
        views = server.conductor.instances(now)
        for name, help in _VIEWS:
            values = {view.name: float(getattr(view, name)) for view in views}
            yield gauges(f"{PREFIX}instance_{_NAMES.get(name, name)}", help, labels, "instance", values)
        blocks: dict[tuple[str, ...], float] = {}
        for view in views:
            for tier in TIERS:
                blocks[view.name, tier] = server.index.blocks(view.name, tier)
        help = "Blocks that an instance has, by its KV events."
        yield table(GaugeMetricFamily, PREFIX + "instance_blocks", help, labels, ("instance", "tier"), blocks)
        yield gauge(PREFIX + "indexed_blocks", "Distinct blocks that somebody has.", labels, server.index.num_blocks)
        yield gauge(PREFIX + "index_bytes", "Memory of the index of blocks.", labels, server.index.num_bytes)
        loads = server.conductor.loads(now)._asdict()
        yield gauges(PREFIX + "load", "Predicted time over its SLO, of a pool.", labels, "pool", loads)

    def _of_decisions(self) -> Iterator[Metric]:
        labels, stats = self._labels, self._server.cluster.stats
        policy = self._server.policy_name
        placed: Counter[tuple[str, ...]] = Counter()
        for (prefill, decode), count in tuple(stats.assignments.items()):
            placed[policy, "prefill", prefill] += count
            placed[policy, "decode", decode] += count
        help, columns = "Requests that were placed on an instance.", ("policy", "stage", "instance")
        yield table(CounterMetricFamily, PREFIX + "assignments", help, labels, columns, placed)
        help = "Prefixes that one instance sent another before its prefill."
        yield table(CounterMetricFamily, PREFIX + "transfers", help, labels, ("source", "instance"), stats.transfers)
        help = "Requests that were rejected, by what binds and before which stage."
        yield table(CounterMetricFamily, PREFIX + "rejections", help, labels, ("bound", "stage"), stats.rejections)
        help = "Requests that an instance did not bring to their end."
        yield table(CounterMetricFamily, PREFIX + "failures", help, labels, ("instance", "reason"), stats.failures)
        for name, help, count in (
            ("retries", "How often a request went on elsewhere.", stats.retries),
            ("role_changes", "Roles of instances that were changed by load.", stats.role_changes),
            ("swapped_blocks", "Cold blocks that instances were told to take out of a tier.", stats.swapped_blocks),
        ):
            yield counter(PREFIX + name, help, labels, count)
        yield stats.ttft_ratio.family(PREFIX + "ttft_over_predicted", labels)
