"""Incidents replayed otherwise and explained, on engines in virtual time."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import drive, recorded_engine, replay

from longctx.models import Llama, LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving import Engine, EngineConfig, Output, ParallelPlan, Request, SamplingParams, Slo
from longctx.serving.predictor.roofline import roofline
from longctx.serving.recording.reader import RecordedLog
from longctx.serving.recording.recorder import Recorder, open_recorder
from longctx.simulation import VirtualExecutor
from longctx.simulation.incident.alternative import Alternative
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.compare import compare, comparison_table, describe_difference
from longctx.simulation.incident.explain import Explainer
from longctx.simulation.incident.replayer import Replayer

CHANGES: list[dict[str, Any]] = [
    {"policy": "fcfs"},
    {"policy": "srpf"},
    {"chunking": "static:8"},
    {"chunking": "adaptive"},
    {"token_budget": 32},
    {"max_running": 3},
    {"admission": "optimistic"},
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


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**20), stages=st.sampled_from([1, 3]), admission=st.sampled_from(["reserve", "optimistic"]))
def test_the_same_settings_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, stages: int, admission: str
) -> None:
    directory = tmp_path_factory.mktemp("log")
    with open_recorder(directory) as recorder:
        plan = ParallelPlan(stages, rank_tokens=8 if stages > 1 else None)
        drive(recorded_engine(recorder, plan, 30, admission=admission), seed)
    baseline, same = alternative(directory)
    assert same.difference is None
    assert same.outputs == baseline.outputs
    comparison = compare(baseline, same, same)
    assert comparison["recorded"] == comparison["predicted"] == comparison["otherwise"]
    assert describe_difference(baseline, same, lambda **hooks: Replayer(RecordedLog(directory), **hooks)) == (
        "no decision differs"
    )


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("private", [False, True])
def test_other_settings_bring_every_request_to_its_end(tmp_path: Path, change: dict[str, Any], private: bool) -> None:
    for seed in range(3):
        with open_recorder(tmp_path, private) as recorder:
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
    [{"policy": "fcfs"}, {"policy": "srpf"}, {"chunking": "static:16"}, {"max_running": 2}, {"num_pages": 40}],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_counterfactual_is_what_the_other_engine_does(tmp_path: Path, seed: int, change: dict[str, Any]) -> None:
    """Steps take what is predicted, so that predictions are true, and the other engine is really run."""
    requests = make_requests(seed)
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
    text = describe_difference(baseline, other, lambda **hooks: Replayer(RecordedLog(tmp_path), **hooks))
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


def explained(requests: list[tuple[float, Request]], directory: Path, request_id: str, **changes: Any) -> list[str]:
    """The causes of a request's waits, in order."""
    with open_recorder(directory) as recorder:
        serve(requests, recorder, **changes)
    spans = Explainer(RecordedLog(recorder.directory), request_id).run()
    assert all(one.start + one.seconds == pytest.approx(other.start) for one, other in itertools.pairwise(spans))
    assert spans[-1].cause.kind == "decode"
    return [span.cause.text for span in spans]


def ask(number: int, length: int, at: float = 0.0, max_tokens: int = 4, first: int = 0, **more: Any) -> Any:
    prompt = [(first or number) % 50] * length
    return at, Request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), request_id=str(number), **more)


def test_waiting_for_a_slot_is_explained(tmp_path: Path) -> None:
    causes = explained([ask(i, 8, max_tokens=20) for i in range(1, 6)], tmp_path, "5")
    assert causes[0].startswith("1, 2, 3, 4 got a slot; 1 ")
    assert causes[1] == "no free slot: 4 sequences run, of at most 4"
    assert causes[-2:] == ["computes its prompt", "decodes"]


def test_waiting_for_memory_is_explained(tmp_path: Path) -> None:
    requests = [ask(1, 700, max_tokens=8), ask(2, 500, max_tokens=8), ask(3, 8)]
    own = explained(requests, tmp_path / "own", "2", policy="fcfs")
    assert "no memory: it needs 32 pages, and 18 can be promised" in own  # a small one has passed it
    requests = [*requests[:1], ask(2, 950, max_tokens=8), ask(3, 8, at=2e-3, max_tokens=200)]
    behind = explained(requests, tmp_path / "behind", "3", policy="fcfs")
    start = "2 waits for memory, which it would hold too long: it needs 60 pages, and 19 can be promised; 2"
    assert any(text.startswith(start) for text in behind)


def test_waiting_for_a_prefix_is_explained(tmp_path: Path) -> None:
    requests = [ask(1, 400), ask(2, 400, first=1)]
    assert "waits for pages of a common prefix, which 1 computes" in explained(requests, tmp_path, "2", policy="fcfs")


@pytest.mark.parametrize(
    ("more", "rule"),
    [({}, "1 is more urgent by fcfs: its urgency is 0.0001 lower"), ({"priority": 2}, "1 has priority 2 over 0")],
)
def test_being_passed_over_is_explained(tmp_path: Path, more: dict[str, Any], rule: str) -> None:
    requests = [ask(1, 600, **more), ask(2, 100, at=1e-4)]
    causes = explained(requests, tmp_path, "2", policy="fcfs")
    assert f"passed over: 1 took the rows; {rule}" in causes


def test_another_tenants_turn_is_explained(tmp_path: Path) -> None:
    requests = [ask(1, 100, tenant="many"), ask(2, 100, tenant="many"), ask(3, 100, tenant="few")]
    causes = explained(requests, tmp_path, "2", max_running=1)
    assert "3 got a slot; 3 is of tenant 'few', which has been served less than 'many'" in causes


def test_preemption_is_explained(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        drive(recorded_engine(recorder, num_pages=26, admission="optimistic", policy="fcfs"), 3, 400)
    log = RecordedLog(tmp_path)
    preempted = [output for output in replay(tmp_path).outputs.values() if output.metrics.preemptions]
    assert preempted
    spans = Explainer(log, preempted[0].request_id, preempted[0].index).run()
    assert any(span.cause.text.startswith("preempted; ") for span in spans)


def test_who_is_not_there_is_not_explained(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        serve(make_requests(0)[:2], recorder)
    with pytest.raises(ValueError, match="no step since completion 0 of a request 'nobody'"):
        Explainer(RecordedLog(tmp_path), "nobody").run()
    with pytest.raises(ValueError, match="no step since completion 3 of a request '1'"):
        Explainer(RecordedLog(tmp_path), "1", 3).run()
