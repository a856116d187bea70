"""`ServerMetrics`: what a server does, in Prometheus's text form.

What vLLM exports too has its names, labels and buckets, so that dashboards, llm-d and the gateway API's inference
extension read it with `prefix="vllm"`. What others don't have is always `longctx:`.
"""

import time
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from longctx.serving.engine.metrics import StepReport
from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.output import FinishReason, Output
from longctx.serving.request.request import Request
from longctx.serving.server import series
from longctx.serving.server.kv_metrics import CacheCounts, TransferCounts
from longctx.serving.server.own_metrics import OwnMetrics
from longctx.serving.server.rendered_metrics import RenderedMetrics
from longctx.serving.server.series import Histogram, counter, counters, gauge, one_two_five
from longctx.serving.server.settings import check_prefix
from longctx.serving.validation import check_text

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
    "moved": "moved",
}


class ServerMetrics(RenderedMetrics):
    """Counts what an engine's thread does from now on, and renders it.

    Args:
      prefix: of the metrics that vLLM has too, such as "vllm".
      thread: its `on_step` and `on_end` get this object's observers.
      model_name: the value of the label `model_name`.

    Raises:
      ValueError: prefix is no name of letters, digits and underscores.
    """

    def __init__(self, prefix: str, thread: EngineThread, model_name: str) -> None:
        check_prefix(prefix)
        self._prefix, self._thread = prefix, thread
        self._labels = {"model_name": check_text("model_name", model_name), "engine": "0"}
        self._histograms = _histograms(thread.engine.max_length)
        self._ends = dict.fromkeys(_REASONS.values(), 0)
        self._own = OwnMetrics(thread, self._labels)
        self._register()
        thread.on_step.append(self.observe_step)
        thread.on_end.append(self.observe_request)

    def observe_step(self, report: StepReport) -> None:
        """A step has ended; in the engine's thread."""
        step, seen = report.metrics, self._histograms
        seen["time_to_first_token_seconds"].observe_all(step.first_tokens)
        seen["inter_token_latency_seconds"].observe_all(step.gaps)
        seen["iteration_tokens_total"].observe(step.decodes + step.prompt_tokens)
        self._own.observe_step(report)

    def observe_request(self, output: Output, request: Request) -> None:
        """A completion has ended; in the engine's thread."""
        metrics, seen, params = output.metrics, self._histograms, request.sampling
        self._ends[_REASONS[output.finish_reason]] += 1
        self._own.observe_request(metrics)
        if output.index == 0:
            seen["request_params_n"].observe(params.n)
        seen["request_params_max_tokens"].observe(params.max_tokens)
        seen["request_prompt_tokens"].observe(metrics.prompt_tokens)
        seen["request_generation_tokens"].observe(metrics.output_tokens)
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

    def observe_refusal(self, reason: str) -> None:
        """A request was refused; in one thread, such as the event loop's."""
        self._own.refusals[reason] = self._own.refusals.get(reason, 0) + 1

    def observe_transfers(
        self, transfers: Mapping[str, TransferCounts], prefills: Mapping[str, Mapping[str, int]] | None = None
    ) -> None:
        """Requests move between this engine and others; how, by direction; and where prompts are read, if elsewhere."""
        self._own.kv.transfers, self._own.kv.prefills = transfers, prefills

    def observe_caches(self, caches: CacheCounts) -> None:
        """Documents are kept; how many, and of how many tokens."""
        self._own.kv.caches = caches

    def collect(self) -> Iterator[Metric]:
        """All families, for `prometheus_client`."""
        prefix, labels, thread = f"{self._prefix}:", self._labels, self._thread
        load, engine = thread.load, thread.engine
        stats = load.stats
        # Requests that came while a step runs are in no load yet.
        waiting = max(load.waiting, thread.control.num_waiting)
        asked = stats.queried_tokens - (stats.cached_tokens - stats.loaded_tokens)
        yield gauge(prefix + "num_requests_running", "Sequences that have slots and pages.", labels, load.running)
        yield gauge(prefix + "num_requests_waiting", "Sequences that wait to be admitted.", labels, waiting)
        yield gauge(
            prefix + "kv_cache_usage_perc", "Share of the pages that sequences hold, 0 to 1.", labels, load.cache_usage
        )
        for name, help, value in (
            ("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.", stats.queried_tokens),
            ("prefix_cache_hits", "Tokens of prompts that were found there.", stats.cached_tokens),
            ("prompt_tokens", "Tokens of prompts, computed or found.", stats.prompt_tokens + stats.cached_tokens),
            ("generation_tokens", "Tokens generated.", stats.output_tokens),
            ("external_prefix_cache_queries", "Those of them that were looked for beyond the devices.", asked),
            ("external_prefix_cache_hits", "Tokens that came from beyond the devices.", stats.loaded_tokens),
            ("num_preemptions", "How often a sequence gave its pages back to others.", stats.preemptions),
        ):
            yield counter(prefix + name, help, labels, value)
        yield counters(prefix + "request_success", "Completions that ended.", labels, "finished_reason", self._ends)
        for name, histogram in self._histograms.items():
            yield histogram.family(prefix + name, labels)
        adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        yield gauge(prefix + "lora_requests_info", "There are no adapters; the value is a time.", adapters, time.time())
        config = {
            "block_size": str(engine.config.page_size),
            "num_gpu_blocks": str(load.num_pages),
            "enable_prefix_caching": str(engine.config.prefix_cache),
            "engine": labels["engine"],
        }
        yield gauge(prefix + "cache_config_info", "What the cache is like; the value is 1.", config, 1)
        yield from self._own.families()


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
