"""The commands `longctx bench` and `longctx profile`, and the workloads that they read."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from small_checkpoint import MODEL, save_small_checkpoint

from longctx.cli import main
from longctx.serving import Engine, EngineConfig
from longctx.simulation import VirtualExecutor
from longctx.simulation.replay import replay
from longctx.simulation.workloads import (
    Lengths,
    WorkloadRequest,
    arrive_at_rate,
    closed_loop,
    scale_lengths,
    synthesize,
)

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
# With one bucket there is little to compile.
ENGINE = ["--page-size", "4", "--max-running", "4", "--token-budget", "8", "--max-length", "128", "--num-pages", "128"]
TRACE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 200, "input_length": 1600, "output_length": 80, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 100, "input_length": 4096, "output_length": 80, "hash_ids": [0, 5, 6, 7, 8, 9, 10, 11]},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    return path


def test_a_trace_is_served(checkpoint: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, figure = tmp_path / "results.json", tmp_path / "figure.svg"
    arguments = ["--workload", str(trace), "--scale-lengths", str(1 / 32), "--json", str(results)]
    if HAS_MATPLOTLIB:
        arguments += ["--plot", str(figure)]
    assert main(["bench", "--model", str(checkpoint), *ENGINE, *arguments]) == 0
    out = capsys.readouterr().out
    assert "skipped 1 requests, longer than 128 tokens" in out
    for figures in ("TTFT", "TPOT", "output tokens/s", "p99"):
        assert figures in out
    contents = json.loads(results.read_text())
    summary, requests = contents["summary"], contents["requests"]
    assert summary["skipped"] == 1
    assert sorted((r["prompt_tokens"], r["output_tokens"]) for r in requests) == [(32, 1), (50, 2)]
    # They share two blocks of 512 tokens, scaled to 16; the cache has all tokens of the first request but the last.
    assert [r["cached_tokens"] for r in requests] == [0, 32]
    assert [r["due"] for r in requests] == [0, 0.2]
    assert all(r["ttft"] > 0 for r in requests)
    assert len(contents["timeline"]["seconds"]) == summary["engine"]["steps"]
    assert not HAS_MATPLOTLIB or figure.read_text().startswith("<?xml")


def test_a_profile_is_measured_and_used(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, results = tmp_path / "profile.json", tmp_path / "results.json"
    model = ["--model", str(checkpoint)]
    assert main(["profile", str(file), *model, *ENGINE, "--repeats", "1", "--check", "3"]) == 0
    out = capsys.readouterr().out
    assert "error, fitted" in out
    assert "of 3 batches" in out
    assert "weighted by time" in out
    profile = json.loads(file.read_text())
    assert profile["predictor"]["buckets"] == [8]
    assert profile["subject"]["page_size"] == 4

    mix = ["--requests", "5", "--prompt-tokens", "2:60", "--output-tokens", "4", "--chunking", "adaptive"]
    mix += ["--policy", "edf", "--tpot", "0.5", "--json", str(results), "--profile", str(file)]
    if HAS_MATPLOTLIB:
        mix += ["--plot", str(tmp_path / "figure.png")]
    assert main(["bench", *model, *ENGINE, *mix]) == 0
    assert "in time" in capsys.readouterr().out
    contents = json.loads(results.read_text())
    assert contents["config"]["slo"]["tpot"] == 0.5
    assert all(r["tpot_target"] == 0.5 and r["slack"] <= 1 for r in contents["requests"])
    steps = contents["steps"]
    assert sum(count for step in steps for _, count in step["chunks"]) == sum(
        r["prompt_tokens"] - r["cached_tokens"] for r in contents["requests"]
    )
    assert all(step["predicted"] > 0 and step["seconds"] > 0 for step in steps)
    known = [step for step in steps if step["is_exact"]]
    errors = [abs(step["predicted"] - step["seconds"]) for step in known]
    summary = contents["summary"]
    assert summary["steps_measured"] == len(known) > 0
    assert summary["prediction_error_by_time"] == pytest.approx(sum(errors) / sum(step["seconds"] for step in known))

    other = ["--page-size", "8", *ENGINE[2:]]
    assert main(["bench", *model, *other, "--requests", "1", "--prompt-tokens", "9", "--profile", str(file)]) == 2
    assert "was measured on another engine: --page-size is 4 there and 8 here" in capsys.readouterr().err


def test_a_synthetic_workload_is_served(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    mix = ["--requests", "6", "--prompt-tokens", "2:9", "--output-tokens", "3", "--shared-prefix", "20", "--rate", "50"]
    assert main(["bench", "--model", str(checkpoint), *ENGINE, *mix, "--json", str(results)]) == 0
    capsys.readouterr()
    requests = json.loads(results.read_text())["requests"]
    assert len({r["due"] for r in requests}) == 6
    assert {r["output_tokens"] for r in requests} == {3}
    assert all(22 <= r["prompt_tokens"] <= 29 for r in requests)
    assert max(r["cached_tokens"] for r in requests) == 20


def test_plots_without_matplotlib_are_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--model", str(checkpoint), "--plot", "figure.png"]) == 2
    assert "--plot needs matplotlib: pip install 'longctx-jax[plot]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mesh_is_measured_and_its_profile_used(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    model = ["--model", str(checkpoint), "--no-compile-cache"]
    plan = ["--context", "2", "--exchange", "kvp"]
    measured = ["profile", str(file), *model, *ENGINE, *plan, "--repeats", "1", "--check", "5", "--max-context", "16"]
    assert main(measured) == 0
    printed = capsys.readouterr().out
    assert "error, held out" in printed
    contents = json.loads(file.read_text())
    assert contents["subject"]["plan"] == {
        "stage": 1,
        "context": 2,
        "tensor": 1,
        "exchange": "kvp",
        "placement": "grow",
    }
    assert contents["notes"]["links"] == {"context": "memory"}
    mix = ["bench", *model, *ENGINE, "--requests", "2", "--prompt-tokens", "9", "--output-tokens", "2"]
    assert main([*mix, *plan, "--profile", str(file)]) == 0
    assert main([*mix, "--profile", str(file)]) == 2
    assert "was measured on another engine: plan is" in capsys.readouterr().err


def test_equal_blocks_have_equal_tokens() -> None:
    a = WorkloadRequest(0, 12, 1, (0, 1, 2), 4, number=0)
    b = WorkloadRequest(0, 11, 1, (0, 1, 3), 4, number=1)
    same = a.tokens(1000) == np.append(b.tokens(1000), -1)
    assert same.tolist() == [True] * 8 + [False] * 4
    assert len(scale_lengths([a], 0.5)[0].tokens(1000)) == 6
    with pytest.raises(ValueError, match="only lengths can be scaled"):
        scale_lengths([WorkloadRequest(0, 2, 1, prompt=(1, 2))], 0.5)


def test_synthetic_lengths_and_arrivals_follow_their_distributions() -> None:
    requests = arrive_at_rate(synthesize(4000, Lengths.parse("10:1000:log"), Lengths.parse("7")), rate=20)
    prompts = np.array([request.prompt_tokens for request in requests])
    assert prompts.min() >= 10
    assert prompts.max() <= 1000
    assert 90 < np.median(prompts) < 110  # a uniform distribution has 505
    assert {request.output_tokens for request in requests} == {7}
    assert requests[-1].arrival == pytest.approx(4000 / 20, rel=0.05)
    assert {request.arrival for request in arrive_at_rate(requests, rate=float("inf"))} == {0.0}


def test_ttft_counts_from_the_due_time_and_follow_ups_come_after_the_answer() -> None:
    """In virtual time a step takes a second, and the second request becomes due in the middle of one."""

    def served(requests: list[WorkloadRequest]) -> list[tuple[float, float | None]]:
        device = VirtualExecutor(lambda batch: 1.0, 50)
        engine = Engine(MODEL, None, EngineConfig(page_size=4, run_ahead=1), executor=device, clock=device.clock)

        def sleep(seconds: float) -> None:
            device.now += seconds

        record = replay(engine, requests, device.clock, sleep)
        return [(each.due, each.ttft) for each in record.served]

    requests = [WorkloadRequest(0.25, 8, 2), WorkloadRequest(0.75, 8, 1, number=1), WorkloadRequest(9, 8, 1, number=2)]
    assert served(requests) == [(0.25, 1.0), (0.75, 1.5), (9, 1.0)]
    # A prompt and one more token, then a second's thought, then the next.
    requests = closed_loop([WorkloadRequest(0.0, 8, 2, number=number) for number in range(3)], users=1, delay=1.0)
    assert served(requests) == [(0, 1), (3, 1), (6, 1)]
    with pytest.raises(ValueError, match="must follow one that stands before it"):
        served(requests[1:])
