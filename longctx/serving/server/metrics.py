"""Metrics of an engine's server, in Prometheus's text form.

Metrics that vLLM exports too have its names, labels and buckets, so that dashboards, llm-d and the gateway API's
inference extension read them with `prefix="vllm"`. All others begin with `longctx:`. They tell what the scheduler
decides, how well it predicts, and what becomes of pages beyond the devices.
"""

import time
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from longctx.serving.engine.metrics import Load, StepMetrics
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.request.output import FinishReason, Metrics, Output
from longctx.serving.request.request import Request
from longctx.serving.server import series
from longctx.serving.server.caches import EngineCaches
from longctx.serving.server.responses_store import ResponseStore
from longctx.serving.server.series import (
    Histogram,
    RenderedMetrics,
    counter,
    gauge,
    one_two_five,
)
from longctx.serving.server.settings import check_prefix
from longctx.serving.server.transfers import TransferCounts
from longctx.serving.validation import check_text

_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
    "moved": "moved",
}
_REFUSALS = ("queue", "tokens", "deadline", "draining", "tpot")
_PREFIX = "longctx:"
_CHUNK_ROWS = tuple(1 << power for power in range(15))
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)
_SLACK = (-10, -4, -2, -1, -0.5, -0.25, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 4, 10)
_LOAD_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# Names of `TierStats`, and of their metrics.
_TIER_COUNTERS = {
    "hits": ("hits", "Pages of loads that came from a tier."),
    "misses": ("misses", "Pages of loads that a tier had not."),
    "stored": ("stored", "Pages written to a tier."),
    "evicted": ("evicted", "Pages removed from a tier for room."),
    "dropped": ("dropped", "Pages that were not written to a tier: there was no room, or an error."),
    "corrupt": ("corrupt", "Pages of a tier that were not what had been written, and unusable files."),
    "failed": ("failed_writes", "Writes to a tier that raised an error."),
    "bytes_read": ("read_bytes", "Bytes of pages read from a tier."),
    "bytes_written": ("written_bytes", "Bytes of pages written to a tier."),
}
_TIER_GAUGES = {
    "pages": ("pages", "Pages that a tier has."),
    "num_bytes": ("bytes", "Bytes that they take."),
    "pinned_bytes": ("pinned_bytes", "Bytes of those that may not go."),
    "capacity": ("capacity_bytes", "Bytes that a tier may have: fewer than configured while its volume is full."),
    "is_failing": ("failing", "1 if the last write to a tier raised an error."),
}


class ServerMetrics(RenderedMetrics):
    """Counts what an engine's thread does from now on, and renders it.

    Attributes:
      refusals: how many requests were refused, by reason.
      caches: documents that are kept; None: not counted.
      responses: of `/v1/responses`; None: not counted.
      transfers: of pages, by direction; None: requests don't move.
    """

    def __init__(self, prefix: str, thread: EngineThread, model_name: str) -> None:
        check_prefix(prefix)
        self._prefix, self._thread, self._engine = f"{prefix}:", thread, thread.engine
        self._labels = {"model_name": check_text("model_name", model_name), "engine": "0"}
        self._histograms, self._own = _histograms(thread.engine.max_length), _own_histograms()
        self._load_seconds = Histogram("Seconds of a load of pages from beyond the devices.", _LOAD_SECONDS)
        self._idle = dict.fromkeys(map(str, range(thread.engine.plan.context)), 0.0)
        self._ends = dict.fromkeys(_REASONS.values(), 0)
        self._kept = {kind: {"true": 0, "false": 0} for kind in ("ttft", "tpot")}
        self.refusals = dict.fromkeys(_REFUSALS, 0)
        self.caches: EngineCaches | None = None
        self.responses: ResponseStore | None = None
        self.transfers: Mapping[str, TransferCounts] | None = None
        self._register()
        thread.on_step.append(self.observe_step)
        thread.on_end.append(self.observe_request)
        thread.engine.pages.on_load.append(self._observe_load)

    def observe_step(self, step: StepMetrics, load: Load) -> None:
        """Count a step that has ended; in the engine's thread."""
        seen, own = self._histograms, self._own
        seen["time_to_first_token_seconds"].observe_all(step.first_tokens)
        seen["inter_token_latency_seconds"].observe_all(step.gaps)
        seen["iteration_tokens_total"].observe(step.decodes + step.prompt_tokens)
        own["step_seconds"].observe(step.seconds)
        for _, count in step.chunks:
            own["chunk_rows"].observe(count)
        if step.is_exact and step.predicted > 0:
            own["step_seconds_over_predicted"].observe(step.seconds / step.predicted)
        for rank, share in enumerate(step.idle_share):
            self._idle[str(rank)] += step.seconds * share

    def observe_request(self, output: Output, request: Request) -> None:
        """Count a completion that has ended; in the engine's thread."""
        metrics, seen, params = output.metrics, self._histograms, request.sampling
        self._ends[_REASONS[output.finish_reason]] += 1
        if metrics.slack is not None:
            self._own["admission_slack_ratio"].observe(metrics.slack)
        for kind, kept in (("ttft", metrics.kept_ttft), ("tpot", metrics.kept_tpot)):
            if kept is not None:
                self._kept[kind][str(kept).lower()] += 1
        if output.index == 0:
            seen["request_params_n"].observe(params.n)
        seen["request_params_max_tokens"].observe(params.max_tokens)
        seen["request_prompt_tokens"].observe(metrics.prompt_tokens)
        seen["request_generation_tokens"].observe(metrics.output_tokens)
        self._observe_times(metrics)

    def _observe_times(self, metrics: Metrics) -> None:
        seen = self._histograms
        arrival, admitted, first, last = metrics.arrival, metrics.admitted, metrics.first_token, metrics.last_token
        if metrics.finished is not None:
            seen["e2e_request_latency_seconds"].observe(metrics.finished - arrival)
        if admitted is not None:
            seen["request_queue_time_seconds"].observe(admitted - arrival)
            if first is not None and last is not None:
                seen["request_prefill_time_seconds"].observe(first - admitted)
                seen["request_decode_time_seconds"].observe(last - first)
                seen["request_inference_time_seconds"].observe(last - admitted)
        if first is not None and last is not None and metrics.output_tokens > 1:
            seen["request_time_per_output_token_seconds"].observe((last - first) / (metrics.output_tokens - 1))

    def _observe_load(self, loaded: Loaded) -> None:
        self._load_seconds.observe(loaded.seconds)

    def observe_refusal(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Yield all families, for `prometheus_client`."""
        yield from self.more()
        yield from self._of_vllm()
        yield from self._of_scheduler()
        store = self._engine.pages.store
        if isinstance(store, TieredStore):
            yield from self._of_tiers(store)
        if self.transfers is not None:
            yield from self._of_transfers(self.transfers)
        if store is not None or self.transfers is not None:
            yield from self._of_loads()
        if self.responses is not None:
            kept, size = self.responses.num_responses, self.responses.num_bytes
            yield gauge(_PREFIX + "stored_responses", "Responses of /v1/responses that are kept.", self._labels, kept)
            yield gauge(_PREFIX + "stored_response_bytes", "Bytes of their items and answers.", self._labels, size)

    def _of_vllm(self) -> Iterator[Metric]:
        """Yield the metrics that vLLM has too."""
        prefix, labels, load, config = self._prefix, self._labels, self._thread.load, self._engine.config
        stats = load.stats
        # Requests that came while a step runs are in no load yet.
        waiting = max(load.waiting, self._thread.control.num_waiting)
        asked = stats.queried_tokens - (stats.cached_tokens - stats.loaded_tokens)
        for name, help, value in (
            ("num_requests_running", "Sequences that have slots and pages.", load.running),
            ("num_requests_waiting", "Sequences that wait to be admitted.", waiting),
            ("kv_cache_usage_perc", "Share of the pages that sequences hold, 0 to 1.", load.cache_usage),
        ):
            yield gauge(prefix + name, help, labels, value)
        for name, help, count in (
            ("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.", stats.queried_tokens),
            ("prefix_cache_hits", "Tokens of prompts that were found there.", stats.cached_tokens),
            ("prompt_tokens", "Tokens of prompts, computed or found.", stats.prompt_tokens + stats.cached_tokens),
            ("generation_tokens", "Tokens generated.", stats.output_tokens),
            ("external_prefix_cache_queries", "Those of them that were looked for beyond the devices.", asked),
            ("external_prefix_cache_hits", "Tokens that came from beyond the devices.", stats.loaded_tokens),
            ("num_preemptions", "How often a sequence gave its pages back to others.", stats.preemptions),
        ):
            yield counter(prefix + name, help, labels, count)
        yield counter(prefix + "request_success", "Completions that ended.", labels, self._ends, "finished_reason")
        for name, histogram in self._histograms.items():
            yield histogram.family(prefix + name, labels)
        adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        yield gauge(prefix + "lora_requests_info", "There are no adapters; the value is a time.", adapters, time.time())
        cache = {
            "block_size": str(config.page_size),
            "num_gpu_blocks": str(load.num_pages),
            "enable_prefix_caching": str(config.prefix_cache),
            "engine": labels["engine"],
        }
        yield gauge(prefix + "cache_config_info", "What the cache is like; the value is 1.", cache, 1)

    def _of_scheduler(self) -> Iterator[Metric]:
        """Yield decisions, predictions, and the devices' utilisation."""
        labels, load = self._labels, self._thread.load
        stats = load.stats
        for name, histogram in self._own.items():
            yield histogram.family(_PREFIX + name, labels)
        for name, help, value in (
            ("waiting_tokens", "Tokens of waiting prompts that were not in the cache.", load.waiting_tokens),
            ("backlog_seconds", "Predicted seconds of all prompts' tokens to compute.", load.backlog_seconds),
            ("pages_free", "Pages that can be promised to sequences.", load.free_pages),
            ("pages_cached", "Pages that can be found by their contents.", stats.pages_cached),
            ("window_pages_held", "Window pages that sequences hold.", stats.window_pages_held),
            ("window_pages_cached", "Window pages that no sequence holds.", stats.window_pages_cached),
        ):
            yield gauge(_PREFIX + name, help, labels, value)
        pages = {str(rank): count for rank, count in enumerate(load.pages_by_rank)}
        yield gauge(_PREFIX + "pages_held", "Pages that sequences hold.", labels, pages, "rank")
        for name, help, count in (
            ("steps", "Steps that were begun.", stats.steps),
            ("stage_idle_steps", "Stages with nothing to do in a step, summed.", stats.idle_stage_steps),
            ("pages_evicted", "Pages that had no holder and were given to other requests.", stats.pages_evicted),
            ("computed_prompt_tokens", "Tokens of prompts computed, those of preempted again.", stats.prompt_tokens),
        ):
            yield counter(_PREFIX + name, help, labels, count)
        idle = "Seconds of steps in which a context rank waits for the busiest one, by prediction."
        yield counter(_PREFIX + "rank_idle_seconds", idle, labels, self._idle, "rank")
        yield counter(_PREFIX + "requests_refused", "Requests refused.", labels, self.refusals, "reason")
        for kind, kept in self._kept.items():
            yield counter(f"{_PREFIX}{kind}_targets", f"Completions that had a {kind} target.", labels, kept, "kept")

    def _of_tiers(self, store: TieredStore) -> Iterator[Metric]:
        labels, stats = self._labels, store.stats
        of = {tier: getattr(stats, tier) for tier in store.tiers}
        for make, families in ((counter, _TIER_COUNTERS), (gauge, _TIER_GAUGES)):
            for attribute, (name, help) in families.items():
                values = {tier: getattr(own, attribute) for tier, own in of.items()}
                yield make(f"{_PREFIX}kv_tier_{name}", help, labels, values, "tier")
        waiting = "Bytes of pages on their way from the devices, or to tiers below host memory."
        yield gauge(_PREFIX + "kv_waiting_bytes", waiting, labels, stats.waiting_bytes)
        if self.caches is not None:
            yield gauge(_PREFIX + "kv_caches", "Documents of /v1/caches.", labels, self.caches.num_caches)
            yield gauge(_PREFIX + "kv_cache_tokens", "Tokens of these documents.", labels, self.caches.num_tokens)
            name, text = _PREFIX + "kv_retained_tokens", "Tokens of prompts that requests asked to keep."
            yield gauge(name, text, labels, self.caches.num_kept_tokens)

    def _of_transfers(self, transfers: Mapping[str, TransferCounts]) -> Iterator[Metric]:
        for direction, counts in transfers.items():
            help = f"Transfers of pages {direction}, by how they ended."
            yield counter(f"{_PREFIX}kv_transfers_{direction}", help, self._labels, counts.outcomes, "outcome")
        for name, help in (
            ("bytes", "Bytes of pages that transfers moved."),
            ("blocks", "Blocks of pages that transfers moved."),
            ("strangers", "Connections and messages of who has not the secret, or speaks another protocol."),
        ):
            moved = {direction: getattr(counts, name) for direction, counts in transfers.items()}
            yield counter(f"{_PREFIX}kv_transfer_{name}", help, self._labels, moved, "direction")

    def _of_loads(self) -> Iterator[Metric]:
        pages, labels, leases = self._engine.pages, self._labels, self._engine.core.leases
        yield self._load_seconds.family(_PREFIX + "kv_load_seconds", labels)
        if (moved := pages.moved) is not None:
            for name, help, count in (
                ("kv_loads", "Loads that ended.", moved.loads),
                ("kv_short_loads", "Loads that came short.", moved.short_loads),
                ("kv_failed_loads", "Loads that raised an error.", moved.failed_loads),
                ("kv_late_loads", "Loads given up, as nothing came for too long.", moved.late_loads),
                ("kv_loaded_pages", "Pages written to the devices.", moved.loaded_pages),
                ("kv_loaded_bytes", "Bytes written to the devices.", moved.loaded_bytes),
                ("kv_stored_pages", "Pages read from the devices, to be kept.", moved.stored_pages),
                ("kv_stored_bytes", "Bytes of these.", moved.stored_bytes),
                ("kv_dropped_pages", "Pages not read from the devices: there was no room.", moved.dropped_stores),
            ):
                yield counter(_PREFIX + name, help, labels, count)
        help = "Pages that were expected of loads, did not come, and were computed instead."
        yield counter(_PREFIX + "kv_recomputed_pages", help, labels, pages.recomputed, "source")
        yield gauge(_PREFIX + "kv_leases", "Leases of pages that other engines may fetch.", labels, len(leases))
        help = "Pages that leases keep, of requests that have ended."
        yield gauge(_PREFIX + "kv_leased_pages", help, labels, leases.num_pages)


def _histograms(max_length: int) -> dict[str, Histogram]:
    lengths = one_two_five(max_length)
    return {
        "time_to_first_token_seconds": Histogram("Seconds from a request's arrival to its first token.", series.TTFT),
        "inter_token_latency_seconds": Histogram("Seconds from a sequence's token to its next one.", series.GAP),
        "request_time_per_output_token_seconds": Histogram("Mean seconds of a request's later tokens.", series.GAP),
        "e2e_request_latency_seconds": Histogram("Seconds from a request's arrival to its end.", series.DURATION),
        "request_queue_time_seconds": Histogram("Seconds from arrival to a slot and pages.", series.DURATION),
        "request_prefill_time_seconds": Histogram("Seconds from admission to the first token.", series.DURATION),
        "request_decode_time_seconds": Histogram("Seconds from the first token to the last.", series.DURATION),
        "request_inference_time_seconds": Histogram("Seconds from admission to the last token.", series.DURATION),
        "request_prompt_tokens": Histogram("Tokens of a request's prompt.", lengths),
        "request_generation_tokens": Histogram("Tokens of a completion.", lengths),
        "request_params_max_tokens": Histogram("What requests give as max_tokens.", lengths),
        "request_params_n": Histogram("What requests give as n.", series.COMPLETIONS),
        "iteration_tokens_total": Histogram("Tokens computed in a step.", series.STEP_TOKENS),
    }


def _own_histograms() -> dict[str, Histogram]:
    slack = "At admission, the share of the time to the TTFT deadline that is left after the prompt."
    return {
        "chunk_rows": Histogram("Tokens of a prompt that are computed in one step.", _CHUNK_ROWS),
        "step_seconds": Histogram("Seconds of a step.", _STEP_SECONDS),
        "step_seconds_over_predicted": Histogram("Seconds of a step over those predicted.", _RATIO),
        "admission_slack_ratio": Histogram(slack, _SLACK),
    }
