"""Measured runs of engines: how they are read and simulated, and overheads that the fit recovers."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from papers.silicon.engines import ENGINES, Overheads, engine_name, make_workload, predict, simulate
from papers.silicon.fit import fit_engine, fit_overheads
from papers.silicon.report import Errors, write_page
from papers.silicon.runs import COLUMNS, Run, read_predictions, read_runs, write_predictions

RUN = Run("run", "vllm", "meta-llama/Llama-3.1-8B-Instruct", 1000, 20, 4, 8, False, False, 0.1, 0.01)


def write(path: Path, columns: tuple[str, ...], row: str) -> Path:
    path.write_text(",".join(columns) + "\n" + row + "\n")
    return path


def test_runs_are_read_in_seconds(tmp_path: Path) -> None:
    row = "a,trtllm,Qwen/Qwen3-32B,h100_sxm,fp8,fp8,1024,128,16,2,840.0,16.5"
    (run,) = read_runs(write(tmp_path / "runs.csv", COLUMNS, row))
    assert run == Run("a", "trtllm", "Qwen/Qwen3-32B", 1024, 128, 16, 2, True, True, 0.84, 0.0165)
    assert run.config.quantization is not None
    assert RUN.config.quantization is None
    llama = dataclasses.replace(RUN, model="meta-llama/Meta-Llama-3.1-70B-Instruct-FP8")
    assert llama.config.num_layers == 80


def test_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no column osl, tp_size"):
        read_runs(write(tmp_path / "runs.csv", tuple(x for x in COLUMNS if x not in ("osl", "tp_size")), "a"))


def test_unknown_models_and_cells_that_are_no_numbers_are_named_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2: model_path 'other': no preset named 'other'"):
        read_runs(write(tmp_path / "runs.csv", COLUMNS, "a,vllm,other,h100_sxm,,,1,1,1,1,1,1"))
    with pytest.raises(ValueError, match="line 2: system must be h100_sxm, got 'b200'"):
        read_runs(write(tmp_path / "runs.csv", COLUMNS, "a,vllm,Qwen/Qwen3-32B,b200,,,1,1,1,1,1,1"))
    with pytest.raises(ValueError, match=r"line 2: .*many"):
        read_runs(write(tmp_path / "runs.csv", COLUMNS, "a,vllm,Qwen/Qwen3-32B,h100_sxm,,,many,1,1,1,1,1"))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_closed_loop_serves_ten_requests_of_each_user_one_at_a_time(engine: str) -> None:
    run = dataclasses.replace(RUN, engine=engine)
    assert engine_name(run) in ENGINES
    record = simulate(run, Overheads(0.001, 0.0))
    assert len(make_workload(run)) == len(record.served) == 40
    assert {each.metrics.prompt_tokens for each in record.served} == {1000}
    assert {each.metrics.output_tokens for each in record.served} == {20}
    starts = [each.metrics.arrival for each in record.served]
    ends = [each.metrics.finished for each in record.served]
    in_flight = [sum(start <= at < end for start, end in zip(starts, ends, strict=True)) for at in starts]
    assert max(in_flight) == 4
    assert min(in_flight[:-4]) >= 1


def test_lengths_may_be_drawn() -> None:
    lengths = [request.prompt_tokens for request in make_workload(RUN, shortest=0.8)]
    assert (min(lengths) >= 800, max(lengths) <= 1000, len({*lengths}) > 10) == (True, True, True)


def test_a_step_of_host_time_adds_as_much_to_each_token() -> None:
    (ttft, tpot), (late, slow) = (predict(RUN, Overheads(step, 0.0)) for step in (0.0, 0.002))
    assert slow - tpot == pytest.approx(0.002, rel=0.1)
    assert late > ttft + 0.002
    assert predict(RUN, Overheads(0.0, 0.05))[0] == pytest.approx(ttft + 0.05)


def test_the_host_starts_layers_of_prompts_one_by_one() -> None:
    run = dataclasses.replace(RUN, users=1)
    (ttft, tpot), (late, same) = (predict(run, Overheads(0.0, 0.0, layer)) for layer in (0.0, 1e-3))
    assert ttft < 0.03
    assert late == pytest.approx(0.002 + 32 * 1e-3, rel=0.1)  # front end and layers: devices take less
    assert same == pytest.approx(tpot)  # steps of decodes alone


def test_with_a_slot_less_than_users_one_waits_for_another_to_end() -> None:
    run = dataclasses.replace(RUN, engine="trtllm", output_tokens=200)
    assert engine_name(run) == "trtllm, Llama"
    ttft, tpot = predict(run)
    assert ttft > 200 * tpot / 4  # of four users, three have slots


@pytest.mark.parametrize("layer", [0.0, 0.45e-3])
def test_the_fit_recovers_overheads_that_made_the_runs(layer: float) -> None:
    true = Overheads(0.002, 0.04, layer)
    runs = []
    for users in (1, 2, 4):
        run = dataclasses.replace(RUN, users=users)
        ttft, tpot = predict(run, true)
        runs.append(dataclasses.replace(run, ttft=ttft, tpot=tpot))
    start = fit_engine(runs, 1, Overheads(0.0, 0.0))
    assert start.step == pytest.approx(true.step, rel=0.05)
    assert start.first_token == pytest.approx(true.first_token, rel=0.05)
    assert start.layer == layer


def test_an_overhead_is_never_negative() -> None:
    slow = [(1.0, 1.0)] * 3
    fitted, error = fit_overheads([RUN] * 3, slow, Overheads(0.001, 0.01))
    assert (fitted, error) == (Overheads(0.0, 0.0), pytest.approx(98.9))


def test_predictions_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_predictions(tmp_path / "ours.csv", {"a": (0.5, 0.01)})
    with (tmp_path / "ours.csv").open("a") as file:
        file.write("not predicted,,\n")
    assert read_predictions(tmp_path / "ours.csv") == {"a": (0.5, 0.01)}


def test_errors_by_hand() -> None:
    found = Errors.of([1.1, 1.6, 3.0], [1.0, 2.0, 3.0])
    assert found[:2] == pytest.approx((0.1, 0.1))
    assert found.rank == pytest.approx(1.0)
    assert Errors.of([3.0, 2.0, 1.0], [1.0, 2.0, 3.0]).rank == pytest.approx(-1.0)
    assert np.isnan(Errors.of([1.0], [1.0]).rank)


def test_the_page_has_both_halves_and_no_measured_time(tmp_path: Path) -> None:
    runs = [dataclasses.replace(RUN, name=str(number), tpot=0.0176543) for number in range(8)]
    ours = {run.name: (0.11, 0.0111) for run in runs[:6]}
    text = write_page(runs, ours, {run.name: (0.2, 0.02) for run in runs}, tmp_path)
    assert text == (tmp_path / "silicon.md").read_text()
    for words in ("fitted half", "other half", "| 6 | 13.3 / 13.3 % | - | 100.0 / 100.0 %", "mean of 1 with at least"):
        assert words in text
    assert "17.65" not in text
    assert (tmp_path / "silicon.svg").read_text().count("<svg") == 1
