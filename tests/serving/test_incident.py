"""Incidents replayed under other settings and explained, on engines in virtual time."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import drive, recorded_engine, replay

from longctx.models import Llama, LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving import Engine, EngineConfig, Output, ParallelPlan, Request, SamplingParams, Slo
from longctx.serving.predictor.roofline import roofline
from longctx.serving.recording.log import RecordedLog
from longctx.serving.recording.recorder import Recorder, open_recorder
from longctx.simulation import VirtualExecutor
from longctx.simulation.incident.alternative import Alternative
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.compare import compare, comparison_table, describe_difference
from longctx.simulation.incident.explain import explain

CHANGES: list[dict[str, Any]] = [
    {"policy": "srpf"},
    {"chunking": "static:8"},
    {"admission": "optimistic"},
    {"policy": "fcfs"},
    {"chunking": "adaptive"},
    {"token_budget": 32},
    {"max_running": 3},
    {"slo": Slo(tpot=1e-3)},
]
MODEL = Llama(LlamaConfig(50, 64, 128, 4, 4, 4, 16, max_positions=10_000))
CONFIG = EngineConfig(page_size=16, num_pages=64, max_running=4, token_budget=64)
PREDICTOR = roofline(MODEL.config, Topology.preset("cpu"), CONFIG.token_budget)


def alternative(directory: Path, num_pages: int | None = None, **changes: Any) -> tuple[Baseline, Alternative]:
    baseline = replay(directory)
    log = RecordedLog(directory)
    config = dataclasses.replace(log.header.config, **changes)
    other = Alternative(log, baseline, config, num_pages or log.header.num_pages)
    other.run()
    return baseline, other


def ends(outputs: dict[int, Output]) -> dict[int, tuple[int, str]]:
    return {order: (len(output.token_ids), output.finish_reason) for order, output in outputs.items()}


@pytest.mark.parametrize(("stages", "admission"), [(1, "reserve"), (1, "optimistic"), (3, "optimistic")])
def test_the_same_settings_change_nothing(tmp_path: Path, stages: int, admission: str) -> None:
    with open_recorder(tmp_path) as recorder:
        plan = ParallelPlan(stages, rank_tokens=8 if stages > 1 else None)
        drive(recorded_engine(recorder, plan, 30, admission=admission), 7)
    baseline, same = alternative(tmp_path)
    assert same.difference is None
    assert same.outputs == baseline.outputs
    comparison = compare(baseline, same, same)
    assert comparison["recorded"] == comparison["predicted"] == comparison["otherwise"]
    assert describe_difference(RecordedLog(tmp_path), baseline, same) == "no decision differs"


@pytest.mark.parametrize(
    "change",
    [pytest.param(x, marks=() if i in (1, 3, 6) else pytest.mark.slow) for i, x in enumerate(CHANGES)],
    ids=str,
)
def test_other_settings_bring_every_request_to_its_end(tmp_path: Path, change: dict[str, Any]) -> None:
    for seed in range(2):
        with open_recorder(tmp_path) as recorder:
            drive(recorded_engine(recorder, num_pages=26), seed)
        baseline, other = alternative(recorder.directory, **change)
        assert other.outputs.keys() >= {
            order for order, output in baseline.outputs.items() if output.finish_reason in ("stop", "length")
        }
        after = ends(other.outputs)
        for order, end in ends(baseline.outputs).items():
            assert end[1] == "cancelled" or after[order][1] == "cancelled" or after[order] == end


def serve(requests: list[tuple[float, Request]], recorder: Recorder | None = None, **changes: Any) -> list[Output]:
    """An engine whose steps take what is predicted, and requests that come at such times."""
    config = dataclasses.replace(CONFIG, **changes)
    executor = VirtualExecutor(lambda batch: PREDICTOR.seconds(batch.work), 50)
    engine = Engine(
        MODEL, None, config, executor=executor, clock=executor.clock, predictor=PREDICTOR, recorder=recorder
    )
    due, outputs = list(requests), []
    while due or engine.has_work:
        while due and due[0][0] <= executor.now:
            at, request = due.pop(0)
            engine.submit(request, at)
        if not engine.has_work:
            executor.now = due[0][0]
            continue
        outputs += [event.output for event in engine.step() if event.output is not None]
    return sorted(outputs, key=lambda output: int(output.request_id))


def make_requests(seed: int) -> list[tuple[float, Request]]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(3e-3, 40)).tolist()
    requests = []
    for number, at in enumerate(times):
        prompt = rng.integers(0, 50, 500 if rng.random() < 0.2 else rng.integers(5, 60)).tolist()
        sampling = SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True)
        requests.append((at, Request(prompt, sampling, request_id=str(number))))
    return requests


@pytest.mark.parametrize(
    "change",
    [{"policy": "srpf"}, {"chunking": "static:16"}, {"max_running": 2}, {"num_pages": 40}],
    ids=str,
)
def test_an_alternative_is_what_the_other_engine_does(tmp_path: Path, change: dict[str, Any]) -> None:
    """Steps take what is predicted, so that predictions are true, and the other engine is really run."""
    requests = make_requests(0)
    with open_recorder(tmp_path) as recorder:
        before = serve(requests, recorder)
    after = serve(requests, **change)
    baseline, other = alternative(tmp_path, **change)
    assert [baseline.outputs[i].metrics for i in range(40)] == [output.metrics for output in before]
    assert baseline.times.error == pytest.approx(0.0, abs=1e-9)
    assert other.difference is not None
    for i, output in enumerate(after):
        found = other.outputs[i].metrics
        for name in ("admitted", "first_token", "last_token", "finished"):
            assert getattr(found, name) == pytest.approx(getattr(output.metrics, name), abs=1e-9)
        assert found.cached_tokens == output.metrics.cached_tokens
    text = describe_difference(RecordedLog(tmp_path), baseline, other)
    assert f"the first decision that differs is in step {other.difference.step}" in text
    assert "is predicted, not measured" in text
    recorded, otherwise = text.splitlines()[1:3]
    assert recorded.split(maxsplit=1)[1] != otherwise.split(maxsplit=1)[1]
    log = RecordedLog(tmp_path)
    control = Alternative(log, baseline, log.header.config, log.header.num_pages, predicts_from=other.difference.number)
    control.run()
    assert control.difference is not None
    assert control.difference.number == other.difference.number
    for i, output in enumerate(before):  # what is predicted of the recorded settings is what they did
        assert control.outputs[i].metrics.finished == pytest.approx(output.metrics.finished, abs=1e-9)
    table = comparison_table(compare(baseline, control, other))
    assert table.startswith("40 completions that ended by themselves")
    assert {line.split("  ")[0] for line in table.splitlines()} >= {"TTFT p50", "TTFT p99", "TPOT p50", "in time"}


def test_what_has_no_room_is_refused(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        serve(make_requests(0), recorder)
    with pytest.raises(ValueError, match="num_pages is too small for request"):
        alternative(tmp_path, num_pages=8)


def ask(number: int, length: int, at: float = 0.0, max_tokens: int = 4) -> tuple[float, Request]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return at, Request([number] * length, sampling, request_id=str(number))


@pytest.mark.parametrize(
    ("requests", "asked", "changes", "cause"),
    [
        ([ask(i, 8, max_tokens=20) for i in range(1, 6)], "5", {}, "lacks a slot or pages; decodes alone are computed"),
        (
            [ask(1, 700, max_tokens=8), ask(2, 500, max_tokens=8)],
            "2",
            {},
            "lacks a slot or pages; prompts of 1",
        ),
        ([ask(1, 600), ask(2, 100, at=1e-4)], "2", {"policy": "fcfs"}, "passed over; prompts of 1 are computed"),
    ],
    ids=["slots", "pages", "passed over"],
)
def test_a_wait_is_explained(
    tmp_path: Path, requests: list[tuple[float, Request]], asked: str, changes: dict[str, Any], cause: str
) -> None:
    with open_recorder(tmp_path) as recorder:
        serve(requests, recorder, **changes)
    spans = explain(RecordedLog(tmp_path), asked)
    assert all(one.start + one.seconds == pytest.approx(other.start) for one, other in itertools.pairwise(spans))
    causes = [span.cause for span in spans]
    assert any(cause in each for each in causes)
    assert causes[-2:] == ["computes its prompt", "decodes"]
    with pytest.raises(ValueError, match="no step since a request 'nobody' came"):
        explain(RecordedLog(tmp_path), "nobody")
