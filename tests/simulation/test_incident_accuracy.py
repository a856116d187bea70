"""Incidents simulated from the first step on: with measured step times, and with predicted ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.predictor import RuntimePredictor
from longctx.serving.recording.reader import RecordedLog
from longctx.serving.recording.recorder import open_recorder
from longctx.serving.scheduler.batch import Batch
from longctx.simulation import VirtualExecutor
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.compare import accuracy_table, simulate_incident
from longctx.simulation.incident.replayer import Replayer
from longctx.simulation.instance.virtual_executor import DeviceSpeed

MODEL = Llama(LlamaConfig(50, 64, 128, 4, 4, 4, 16, max_positions=10_000))
CONFIG = EngineConfig(page_size=16, num_pages=64, max_running=4, token_budget=64, prefix_cache=False)
PREDICTOR = RuntimePredictor.of_rows({64: 1e-3}, (1, 64), (1e-6, 4e-6), 1e-4)


def record(directory: Path, noise: float, stages: int, host: float = 0.0, **changes: Any) -> tuple[Path, list[Any]]:
    """A log of an engine whose steps take up to `noise` times as long as predicted, and the outputs."""
    rng = np.random.default_rng(0)
    factors = 1 + noise * rng.random(5000) ** 4  # now and then a slow one

    def seconds(batch: Batch) -> float:
        return float(PREDICTOR.seconds(batch.work) * factors[batch.index])

    executor = VirtualExecutor(seconds, 50, stages)
    config, outputs = EngineConfig(**{**CONFIG.__dict__, **changes}), []
    due = np.cumsum(rng.exponential(5e-3, 60)).tolist()
    with open_recorder(directory) as recorder:
        engine = Engine(
            MODEL,
            None,
            config,
            executor=executor,
            clock=executor.clock,
            predictor=PREDICTOR,
            recorder=recorder,
            plan=ParallelPlan(stages),
        )
        while due or engine.has_work:
            while due and due[0] <= executor.now:
                prompt = rng.integers(0, 50, 500 if rng.random() < 0.1 else rng.integers(5, 60)).tolist()
                sampling = SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True)
                engine.submit(Request(prompt, sampling), due.pop(0))
            if not engine.has_work:
                executor.now = due[0]
                continue
            outputs += [event.output for event in engine.step() if event.output is not None]
            executor.now += host
    return recorder.directory, outputs


def simulated(directory: Path) -> dict[str, Any]:
    log = RecordedLog(directory)
    baseline = Baseline(Replayer(log))
    baseline.run()
    return simulate_incident(log, baseline)


@pytest.mark.parametrize("policy", ["fcfs", "srpf", "ilrs"])
def test_measured_step_times_give_queueing_exactly(tmp_path: Path, policy: str) -> None:
    """Also where predictions are bad: they alone differ."""
    directory, outputs = record(tmp_path, 9.0, 1, policy=policy)
    found = simulated(directory)
    assert found["completions"] == len(outputs) == 60
    for name in ("ttft", "tpot"):
        real = [getattr(output.metrics, name) for output in outputs if getattr(output.metrics, name) is not None]
        recorded, measured, predicted = (found[name][side] for side in ("recorded", "measured", "predicted"))
        assert recorded["mean"] == pytest.approx(np.mean(real))
        for figure, value in recorded.items():
            assert measured[figure] == pytest.approx(value, rel=1e-6)
        assert measured["correlation"] == pytest.approx(1.0, abs=1e-6)
        assert max(abs(predicted[figure] / value - 1) for figure, value in recorded.items()) > 0.02
    table = accuracy_table(found)
    assert "60 completions; predictions of its steps are off by" in table
    assert table.count("+0.0%") + table.count("-0.0%") >= 8
    assert {line.split("  ")[0] for line in table.splitlines()[2:]} >= {"TTFT mean", "TPOT p99", "TTFT correlation"}


def test_a_pipeline_is_simulated_closely(tmp_path: Path) -> None:
    """A log has the times of steps, not of the ticks in which other batches were the slowest."""
    directory, _ = record(tmp_path, 9.0, 2)
    found = simulated(directory)
    for name in ("ttft", "tpot"):
        assert found[name]["measured"]["mean"] == pytest.approx(found[name]["recorded"]["mean"], rel=0.03)


def test_true_predictions_leave_no_difference(tmp_path: Path) -> None:
    directory, _ = record(tmp_path, 0.0, 1)
    found = simulated(directory)
    assert found["step_time_error"] == pytest.approx(0.0, abs=1e-9)
    for name in ("ttft", "tpot"):
        for figure, value in found[name]["recorded"].items():
            assert found[name]["predicted"][figure] == pytest.approx(value, rel=1e-6)


def test_what_the_thread_does_between_steps_is_in_the_log(tmp_path: Path) -> None:
    """Steps that are not planned ahead wait for it."""
    directory, _ = record(tmp_path, 0.0, 1, host=4e-4, run_ahead=1)
    found = simulated(directory)
    for figure, value in found["tpot"]["recorded"].items():  # of which the thread takes a fifth
        assert found["tpot"]["measured"][figure] == pytest.approx(value, rel=2e-3)


def test_a_slow_moment_meets_whatever_runs_then() -> None:
    speed = DeviceSpeed([(10.0, 11.0, 1.0), (11.0, 14.0, 1.0), (20.0, 20.5, 1.0)])
    assert speed.seconds(10.0, 1.0) == pytest.approx(1.0)
    assert speed.seconds(11.0, 1.0) == pytest.approx(3.0)
    assert speed.seconds(10.5, 1.0) == pytest.approx(0.5 + 1.5)
    assert speed.seconds(15.0, 2.0) == pytest.approx(2.0)  # nothing was measured then
    assert speed.seconds(20.0, 2.0) == pytest.approx(0.5 + 1.0)
    assert speed.seconds(100.0, 2.0) == pytest.approx(2.0)
