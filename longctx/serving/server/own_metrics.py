"""The metrics that other servers don't have: what the scheduler decides, how well it predicts, what devices use."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from longctx.serving.engine.metrics import StepReport
from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.output import Metrics
from longctx.serving.server.kv_metrics import KvMetrics
from longctx.serving.server.series import Histogram, Window, counter, counters, gauge, gauges
from longctx.serving.server.utilisation import ModelCost, Peak

PREFIX = "longctx:"

_CHUNK_ROWS = tuple(1 << power for power in range(15))
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)
_SLACK = (-10, -4, -2, -1, -0.5, -0.25, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 4, 10)
_STEPS = 512  # that MFU and MBU are of
REFUSALS = ("queue", "tokens", "deadline", "draining", "tpot")


class OwnMetrics:
    """Part of `ServerMetrics`, which calls the observers in the engine's thread.

    Attributes:
      refusals: how many, by reason.
      kv: of pages beyond the devices.
    """

    def __init__(self, thread: EngineThread, labels: dict[str, str]) -> None:
        self._thread, self._labels = thread, labels
        self._cost, self._peak = ModelCost.of(thread.engine), Peak.of(thread.engine)
        self._histograms = {
            "chunk_rows": Histogram("Tokens of a prompt that are computed in one step.", _CHUNK_ROWS),
            "step_seconds": Histogram("Seconds of a step.", _STEP_SECONDS),
            "step_seconds_over_predicted": Histogram("Seconds of a step over those predicted.", _RATIO),
            "admission_slack_ratio": Histogram(
                "At admission, the share of the time to the TTFT deadline that is left after the prompt.", _SLACK
            ),
        }
        self._idle = dict.fromkeys(map(str, range(thread.engine.plan.context)), 0.0)
        self._window, self._flops, self._bytes = Window(_STEPS, 3), 0.0, 0.0
        self._kept = {(kind, kept): 0 for kind in ("ttft", "tpot") for kept in (True, False)}
        self.refusals = dict.fromkeys(REFUSALS, 0)
        self.kv = KvMetrics(thread, PREFIX, labels)

    def observe_step(self, report: StepReport) -> None:
        step, seen = report.metrics, self._histograms
        seen["step_seconds"].observe(step.seconds)
        for _, count in step.chunks:
            seen["chunk_rows"].observe(count)
        if step.is_exact and step.predicted > 0:
            seen["step_seconds_over_predicted"].observe(step.seconds / step.predicted)
        for rank, share in enumerate(step.idle_share):
            self._idle[str(rank)] += step.seconds * share
        flops, read = self._cost.flops(step), self._cost.bytes(step)
        self._flops += flops
        self._bytes += read
        self._window.add(flops, read, step.seconds)

    def observe_request(self, metrics: Metrics) -> None:
        if metrics.slack is not None:
            self._histograms["admission_slack_ratio"].observe(metrics.slack)
        for kind, kept in (("ttft", metrics.kept_ttft), ("tpot", metrics.kept_tpot)):
            if kept is not None:
                self._kept[kind, kept] += 1

    def families(self) -> Iterator[Metric]:
        """All of them, for `prometheus_client`."""
        labels, load = self._labels, self._thread.load
        stats = load.stats
        for name, histogram in self._histograms.items():
            yield histogram.family(PREFIX + name, labels)
        for name, help, value in (
            ("waiting_tokens", "Tokens of waiting prompts that were not in the cache.", load.waiting_tokens),
            ("backlog_seconds", "Predicted seconds of all prompts' tokens to compute.", load.backlog_seconds),
            ("pages_free", "Pages that can be promised to sequences.", load.free_pages),
            ("pages_cached", "Pages that can be found by their contents.", stats.pages_cached),
        ):
            yield gauge(PREFIX + name, help, labels, value)
        pages = {str(rank): float(count) for rank, count in enumerate(load.pages_by_rank)}
        yield gauges(PREFIX + "pages_held", "Pages that sequences hold.", labels, "rank", pages)
        for name, help, count in (
            ("steps", "Steps that were begun.", stats.steps),
            ("stage_idle_steps", "Stages with nothing to do in a step, summed.", stats.idle_stage_steps),
            ("pages_evicted", "Pages that were found by nobody and given to others.", stats.pages_evicted),
            ("computed_prompt_tokens", "Tokens of prompts computed, those of preempted again.", stats.prompt_tokens),
            ("model_flops", "Operations that the model needed, estimated.", self._flops),
            ("model_read_bytes", "Bytes that the model needed to read, estimated.", self._bytes),
        ):
            yield counter(PREFIX + name, help, labels, count)
        idle = "Seconds of steps in which a context rank waits for the busiest one, by prediction."
        yield counters(PREFIX + "rank_idle_seconds", idle, labels, "rank", self._idle)
        yield counters(PREFIX + "requests_refused", "Requests refused.", labels, "reason", self.refusals)
        for kind in ("ttft", "tpot"):
            kept = {str(kept).lower(): float(self._kept[kind, kept]) for kept in (True, False)}
            yield counters(f"{PREFIX}{kind}_targets", f"Completions that had a {kind} target.", labels, "kept", kept)
        yield from self.kv.families()
        if self._peak is not None:
            flops, read, seconds = self._window.sums
            used = f"Share of all devices' {{}} that the last {_STEPS} steps used."
            if seconds > 0:
                mfu, mbu = flops / seconds / self._peak.flops, read / seconds / self._peak.bandwidth
                yield gauge(PREFIX + "mfu_ratio", used.format("operations"), labels, mfu)
                yield gauge(PREFIX + "mbu_ratio", used.format("memory bandwidth"), labels, mbu)
