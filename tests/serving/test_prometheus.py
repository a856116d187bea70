"""Metrics: the names and buckets that others scrape, values that agree with what requests got, and what they cost."""

import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from fake_device import VOCAB, make_engine
from prometheus_client.parser import text_string_to_metric_families

from longctx.serving import ParallelPlan, Request, SamplingParams
from longctx.serving.config import AdmissionLimits
from longctx.serving.engine.admission_control import AdmissionControl, Refused
from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.output import Output
from longctx.serving.server.metrics import ServerMetrics

# The metrics, types and labels of vLLM that dashboards, llm-d and the gateway API's inference extension read.
VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "external_prefix_cache_queries_total": "counter",
    "external_prefix_cache_hits_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "num_preemptions_total": "counter",
    "request_success_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram",
    "request_params_n": "histogram",
    "iteration_tokens_total": "histogram",
    "lora_requests_info": "gauge",
    "cache_config_info": "gauge",
}
BUCKETS = {
    "time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
    "inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "e2e_request_latency_seconds": ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
}
for name in ("queue", "prefill", "decode"):
    BUCKETS[f"request_{name}_time_seconds"] = BUCKETS["e2e_request_latency_seconds"]


class Samples(dict[tuple[str, frozenset], float]):
    """The samples of a rendering by name and labels, but for the model's and the engine's."""

    def __init__(self, text: bytes) -> None:
        self.types: dict[str, str] = {}
        for family in text_string_to_metric_families(text.decode()):
            self.types[family.name + ("_total" if family.type == "counter" else "")] = family.type
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                self[sample.name, frozenset(labels.items())] = sample.value

    def get_one(self, name: str, **labels: str) -> float:
        return self[name, frozenset(labels.items())]


def run(thread: EngineThread, requests: list[Request]) -> list[Output]:
    """The outputs of requests that a thread runs."""
    outputs: list[Output] = []
    for request in requests:
        sink = lambda events: outputs.extend(event.output for event in events if event.output is not None)  # noqa: E731
        thread.submit(thread.engine.prepare(request), sink)
    assert thread.wait_idle(30)
    return outputs


def fresh(metrics: ServerMetrics) -> Samples:
    return Samples(metrics.render(max_age=0))


def test_names_types_and_buckets_are_those_that_others_read() -> None:
    metrics = ServerMetrics("vllm", EngineThread(make_engine()), "some/model")
    text = metrics.render().decode()
    samples = Samples(text.encode())
    assert {name.removeprefix("vllm:"): kind for name, kind in samples.types.items() if name[:5] == "vllm:"} == VLLM
    for name, bounds in BUCKETS.items():
        found = {dict(labels)["le"] for series, labels in samples if series == f"vllm:{name}_bucket"}
        assert {float(x) for x in found} == {*map(float, bounds.split()), float("inf")}
    assert 'vllm:num_requests_waiting{engine="0",model_name="some/model"} 0.0' in text
    assert (
        samples.get_one("vllm:cache_config_info", block_size="4", num_gpu_blocks="24", enable_prefix_caching="True")
        == 1
    )
    lora = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert abs(samples.get_one("vllm:lora_requests_info", **lora) - time.time()) < 60
    ends = {dict(labels)["finished_reason"] for name, labels in samples if name == "vllm:request_success_total"}
    assert ends == {"stop", "length", "abort", "error", "moved"}
    own = {name for name in samples.types if name.startswith("longctx:")}
    default = Samples(ServerMetrics("longctx", EngineThread(make_engine()), "m").render())
    renamed = {f"longctx:{name}" for name in VLLM}
    assert {name for name in default.types if ":" in name} == renamed | own
    assert not renamed & own


@pytest.mark.parametrize("prefix", ["", "a-b", "vllm:", "9", "é", "a b"])
def test_prefixes_that_are_no_names_are_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="metrics_prefix must be of letters, digits and underscores"):
        ServerMetrics(prefix, EngineThread(make_engine()), "m")


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (ParallelPlan(), {"num_pages": 200}),
        (ParallelPlan(2, 3, rank_tokens=16), {"num_pages": 60}),
        (ParallelPlan(), {"num_pages": 30, "admission": "optimistic", "prefix_cache": False}),
    ],
    ids=["one device", "stages and ranks", "little memory"],
)
def test_values_agree_with_the_requests_own(plan: ParallelPlan, options: dict) -> None:
    engine = make_engine(plan=plan, **options)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            rng.integers(0, VOCAB, rng.integers(1, 60)).tolist(),
            SamplingParams(max_tokens=int(rng.integers(1, 30)), temperature=1.0, n=int(rng.integers(1, 3)), seed=i),
            ttft_deadline=0.05,
        )
        for i in range(30)
    ]
    thread = EngineThread(engine, AdmissionControl(engine, AdmissionLimits(heeds_deadlines=False)))
    metrics = ServerMetrics("vllm", thread, "m")
    with thread:
        outputs = run(thread, requests + requests[:5])
    got, each = fresh(metrics), [output.metrics for output in outputs]
    stats = engine.stats()
    assert len(outputs) == sum(request.sampling.n for request in requests + requests[:5])
    assert got.get_one("vllm:generation_tokens_total") == sum(len(output.token_ids) for output in outputs)
    assert got.get_one("vllm:prefix_cache_queries_total") == sum(x.prompt_tokens for x in each)
    assert got.get_one("vllm:prefix_cache_hits_total") == sum(x.cached_tokens for x in each) == stats.cached_tokens
    assert got.get_one("vllm:num_preemptions_total") == stats.preemptions
    assert (stats.preemptions > 0) == (options.get("admission") == "optimistic")
    if not stats.preemptions:
        assert got.get_one("vllm:prompt_tokens_total") == sum(x.prompt_tokens for x in each)
    assert got.get_one("vllm:num_requests_running") == got.get_one("vllm:num_requests_waiting") == 0
    for reason in ("stop", "length"):
        count = sum(output.finish_reason == reason for output in outputs)
        assert got.get_one("vllm:request_success_total", finished_reason=reason) == count

    def check(name: str, values: list[float]) -> None:
        assert got.get_one(f"vllm:{name}_count") == len(values)
        assert got.get_one(f"vllm:{name}_sum") == pytest.approx(sum(values))
        for (series, labels), count in got.items():
            if series == f"vllm:{name}_bucket":
                assert count == sum(value <= float(dict(labels)["le"]) for value in values)

    check("time_to_first_token_seconds", [x.ttft or 0 for x in each])
    check("e2e_request_latency_seconds", [(x.finished or 0) - x.arrival for x in each])
    check("request_queue_time_seconds", [(x.admitted or 0) - x.arrival for x in each])
    check("request_generation_tokens", [x.output_tokens for x in each])
    check("request_params_n", [request.sampling.n for request in requests + requests[:5]])
    # Between each two tokens is a gap, and they add up to the time of all decodes.
    assert got.get_one("vllm:inter_token_latency_seconds_count") == sum(x.output_tokens - 1 for x in each)
    decodes = [(x.last_token or 0) - (x.first_token or 0) for x in each]
    assert got.get_one("vllm:inter_token_latency_seconds_sum") == pytest.approx(sum(decodes))
    check("request_decode_time_seconds", decodes)
    # Ours.
    kept = sum(bool(x.kept_ttft) for x in each)
    assert got.get_one("longctx:ttft_targets_total", kept="true") == kept
    assert got.get_one("longctx:ttft_targets_total", kept="false") == len(each) - kept
    # A histogram of numbers below zero has no sum, which would not only grow.
    assert got.get_one("longctx:admission_slack_ratio_bucket", le="+Inf") == len(each)
    assert (
        got.get_one("longctx:chunk_rows_sum")
        == stats.prompt_tokens
        == got.get_one("longctx:computed_prompt_tokens_total")
    )
    ranks = range(plan.context)
    assert all(got.get_one("longctx:pages_held", rank=str(rank)) == 0 for rank in ranks)
    idle = [got.get_one("longctx:rank_idle_seconds_total", rank=str(rank)) for rank in ranks]
    total = got.get_one("longctx:step_seconds_sum")
    assert all(0 <= seconds < total for seconds in idle)
    assert any(idle) == (plan.context > 1)


def test_cancels_refusals_and_pages_are_counted() -> None:
    engine = make_engine()
    thread = EngineThread(engine, AdmissionControl(engine, AdmissionLimits(max_waiting=1)))
    metrics, ended = ServerMetrics("vllm", thread, "m"), threading.Event()
    prepared = engine.prepare(Request([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True)))
    first = thread.submit(prepared, lambda events: events[-1].output is not None and ended.set())
    waiting = fresh(metrics)
    assert waiting.get_one("vllm:num_requests_waiting") == 1  # although no step has run
    with pytest.raises(Refused) as refused:
        thread.submit(prepared, print)
    metrics.observe_refusal(refused.value.reason)
    held: dict[str, float] = {}
    thread.on_step.append(
        lambda step, load: held.setdefault("pages", fresh(metrics).get_one("longctx:pages_held", rank="0"))
    )
    thread.on_step.append(lambda step, load: thread.cancel(first))
    with thread:
        assert ended.wait(30)
    got = fresh(metrics)
    assert held["pages"] > 0
    assert got.get_one("vllm:request_success_total", finished_reason="abort") == 1
    assert got.get_one("longctx:requests_refused_total", reason="queue") == 1
    assert got.get_one("longctx:requests_refused_total", reason="tokens") == 0


def test_renderings_are_kept_for_a_while() -> None:
    metrics = ServerMetrics("vllm", EngineThread(make_engine()), "m")
    first = metrics.render(max_age=60)
    assert metrics.render(max_age=60) is first
    assert metrics.render(max_age=0) is not first


def test_nothing_is_counted_twice_by_concurrent_scrapes() -> None:
    thread = EngineThread(make_engine(num_pages=200))
    metrics, seen = ServerMetrics("vllm", thread, "m"), defaultdict[str, list[float]](list)
    stop = threading.Event()

    def scrape() -> None:
        while not stop.is_set():
            got = Samples(metrics.render(max_age=0))
            bucket = got.get_one("vllm:inter_token_latency_seconds_bucket", le="+Inf")
            assert bucket == got.get_one("vllm:inter_token_latency_seconds_count")
            seen["gaps"].append(bucket)

    scrapers = [threading.Thread(target=scrape) for _ in range(2)]
    for scraper in scrapers:
        scraper.start()
    with thread:
        outputs = run(thread, [Request([i % VOCAB, 2], SamplingParams(max_tokens=40)) for i in range(12)])
    stop.set()
    for scraper in scrapers:
        scraper.join()
    total = sum(len(output.token_ids) - 1 for output in outputs)
    assert fresh(metrics).get_one("vllm:inter_token_latency_seconds_count") == total
    assert max(seen["gaps"]) <= total
