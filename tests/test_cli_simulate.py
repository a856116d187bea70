"""The command `longctx simulate`: what it prints and writes, what it searches, and what it refuses."""

import csv
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.cli import main
from longctx.models.builtin import TINY
from longctx.models.config import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.plotting import COLORS
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import RuntimePredictor
from longctx.serving.predictor.file import save_profile
from longctx.simulation.capacity import PRECISION, parse_targets, search
from longctx.simulation.hardware import saturating_rows
from longctx.simulation.models import MODELS
from longctx.simulation.sweep import parse_grid, points
from longctx.simulation.workloads.arrivals import MAX_RATE

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
# Long and short prompts on two ranks and two stages of a pipeline.
SMALL = ["--requests", "12", "--prompt-tokens", "100:30000:log", "--output-tokens", "5:20", "--qps", "2"]
PLAN = ["--stage=2", "--tensor=4", "--context=2", "--rank-tokens=8192", "--topology", "h100-rdma", "--preset", "medha"]


def simulate(*arguments: str) -> int:
    return main(["simulate", "--quiet", *arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a simulation of two instances has written, in a process that loads no JAX."""
    folder = tmp_path_factory.mktemp("simulated")
    more = ["--instances", "2", "--json", str(folder / "all.json"), "--trace", str(folder / "trace.json")]
    arguments = ["simulate", *SMALL, *PLAN, *more, "--out", str(folder)]
    program = f"import sys; from longctx.cli import main; print(main({arguments}), 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def test_a_workload_is_simulated_without_jax(folder: Path) -> None:
    printed = (folder / "printed.txt").read_text()
    assert printed.splitlines()[-1] == "0 False"
    for name in ("TTFT", "TPOT", "SLO", "MFU", "MBU", "GPU-seconds", "p99"):
        assert name in printed
    contents = json.loads((folder / "all.json").read_text())
    summary = contents["summary"]
    assert (summary["requests"], summary["usage"]["devices"], contents["instances"]) == (12, 32, 2)
    assert len(contents["requests"]) == 12
    assert contents["steps"]
    assert 0 < summary["usage"]["mfu"] <= summary["usage"]["busy_mfu"] < 1
    assert 0 < summary["usage"]["mbu"] <= summary["usage"]["busy_mbu"] < 1
    assert summary["usage"]["gpu_seconds"] == pytest.approx(32 * summary["seconds"])
    assert contents["config"]["num_pages"] > 0


def test_looking_at_a_simulation_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*SMALL, *PLAN, "--instances", "2") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 10
    assert set(printed) <= set((folder / "printed.txt").read_text().splitlines())


def test_requests_are_written_with_the_columns_of_vidur(folder: Path) -> None:
    with (folder / "request_metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"request_num_restarts", "request_pd_ratio", "request_inter_arrival_delay"} <= {*rows[0]}
    assert sorted(int(row["Request Id"]) for row in rows) == list(range(12))
    assert {row["instance"] for row in rows} == {"0", "1"}
    for row in rows:
        waits, runs = float(row["request_scheduling_delay"]), float(row["request_execution_plus_preemption_time"])
        assert waits + runs == pytest.approx(float(row["request_e2e_time"]), abs=1e-6)
        prefill = waits + float(row["prefill_time_execution_plus_preemption"])
        assert prefill == pytest.approx(float(row["prefill_e2e_time"]), abs=1e-6)


def test_the_page_loads_nothing(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "<h2>Summary</h2>" in page
    assert ("<svg" in page) == HAS_MATPLOTLIB
    for loads in ("<script", "<link", "<img", "@import", "src=", 'xlink:href="http'):
        assert loads not in page


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_the_drawing_is_beside_the_page(folder: Path) -> None:
    """As SVG, the same as in the page, and as PNG for what shows no SVG."""
    drawing = (folder / "drawing.svg").read_text()
    assert drawing[drawing.find("<svg") :].strip() in (folder / "report.html").read_text()
    assert COLORS[0] in drawing
    assert (folder / "drawing.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_shows_every_batch_in_every_stage(folder: Path) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert names == {
        *(("process_name", name) for name in ("requests", "instance 0", "instance 1")),
        *(("thread_name", f"stage {stage}") for stage in range(2)),
    }
    for process in (1, 2):
        slices = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        batches = [[event["args"]["batch"] for event in slices if event["tid"] == stage] for stage in (1, 2)]
        assert batches[0] == batches[1]
        for stage in (1, 2):
            ends = 0.0
            for event in (event for event in slices if event["tid"] == stage):
                assert event["ts"] >= ends - 0.01
                ends = event["ts"] + event["dur"]
    steps = json.loads((folder / "all.json").read_text())["steps"]
    last = max(event["ts"] + event["args"]["tick_seconds"] * 1e6 for event in events if event["ph"] == "X")
    assert last == pytest.approx(1e6 * max(step["finished"] for step in steps), abs=1)
    requests = [event for event in events if event.get("cat") == "request"]
    assert sum(event["ph"] == "b" for event in requests) == sum(event["ph"] == "e" for event in requests) == 4 * 12
    assert any(event["ph"] == "C" and event["args"].get("rank 1", 0) > 0 for event in events)


def test_a_sweep_has_a_row_for_each_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One plan does not fit: it says so, and hides no other."""
    sweep = ["--sweep", "tensor=1,8,policy=fcfs,ilrs", "--jobs", "1", "--out", str(tmp_path)]
    assert simulate(*SMALL, "--model", "llama-3-70b", *sweep) == 0
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["tensor"], row["policy"]) for row in rows] == [
        (tensor, policy) for tensor in ("1", "8") for policy in ("fcfs", "ilrs")
    ]
    assert ["GB on each device" in row["error"] for row in rows] == [True, True, False, False]
    assert all(float(row["ttft.p50"]) > 0 for row in rows[2:])
    assert (tmp_path / "drawing.svg").is_file() == (tmp_path / "drawing.png").is_file() == HAS_MATPLOTLIB
    assert capsys.readouterr().out.count("GB on each device") == 2


def test_a_capacity_meets_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "all.json"
    workload = ["--requests", "40", "--prompt-tokens", "2000", "--output-tokens", "4"]
    assert simulate(*workload, "--capacity", "ttft_p90=0.5", "--json", str(results)) == 0
    found = json.loads(results.read_text())["summary"]
    assert 0 < found["ttft"]["p90"] <= 0.5
    tried = found["capacity"]["tried"]
    missed = min(rate for rate, is_met in tried if not is_met)
    assert found["capacity"]["rate"] < missed <= (1 + PRECISION) * found["capacity"]["rate"]
    assert f"capacity  {found['capacity']['rate']:.4g} requests/s meet ttft_p90=0.5" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [0.001, 1.0, 37.5])
def test_a_search_finds_where_a_target_is_missed(limit: float) -> None:
    found = search(lambda rate: rate <= limit, 1.0)
    assert limit / (1 + PRECISION) <= found.rate <= limit
    assert search(lambda rate: False, 1.0).rate == 0
    assert 0.5 * MAX_RATE < search(lambda rate: True, 1e4).rate <= MAX_RATE  # no rate misses it


def test_users_wait_for_answers_and_windows_close(capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["--mix", "sharegpt4", "--requests", "30"]
    assert simulate(*workload, "--users", "2", "--window", "4", "--tensor", "4") == 0
    printed = capsys.readouterr().out
    assert "open requests" in printed
    assert "2 had not ended when the window closed" in printed


def test_requests_that_a_window_cuts_off_count(tmp_path: Path) -> None:
    """They are those that wait longest: to leave them out would make an overloaded engine look well."""
    workload = ["--requests", "200", "--qps", "40", "--prompt-tokens", "5000", "--output-tokens", "2", "--window", "3"]
    assert simulate(*workload, "--json", str(tmp_path / "all.json")) == 0
    contents = json.loads((tmp_path / "all.json").read_text())
    summary, ended = contents["summary"], contents["requests"]
    assert summary["open"] > summary["requests"] == len(ended)
    assert summary["ttft"]["p99"] > max(request["ttft"] for request in ended)
    in_time = sum(request["ttft"] <= request["ttft_deadline"] for request in ended)
    assert 0 < summary["in_time"] < 0.5 * in_time / len(ended)


def test_targets_and_grids_are_parsed() -> None:
    targets = parse_targets("ttft_p90=30,tpot_p99.5=0.1,in_time=0.95")
    assert [(target.name, target.share, target.seconds) for target in targets] == [
        ("ttft", 0.9, 30.0),
        ("tpot", 0.995, 0.1),
        ("in_time", 0.95, math.inf),
    ]
    assert ",".join(map(str, targets)) == "ttft_p90=30,tpot_p99.5=0.1,in_time=0.95"
    grid = parse_grid("policy=fcfs, ilrs,qps=0.5,1", {"policy": str, "qps": float})
    assert grid == {"policy": ["fcfs", "ilrs"], "qps": [0.5, 1.0]}
    assert points(grid)[1] == {"policy": "fcfs", "qps": 1.0}


def test_a_checkpoint_s_configuration_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(TINY), "--topology", "cpu", "--requests", "3", "--prompt-tokens", "20"]
    assert simulate(*arguments) == 0
    assert "3 in " in capsys.readouterr().out
    assert simulate(*arguments[:-1], "100000000") == 2
    assert "longer than the model's context" in capsys.readouterr().err


def test_baselines_are_swept_on_the_same_devices(tmp_path: Path) -> None:
    names = ["medha", "sarathi-2048", "vllm", "striped"]
    sweep = ["--sweep", f"baseline={','.join(names)}", "--jobs", "1", "--out", str(tmp_path)]
    assert simulate(*SMALL, "--stage", "2", "--tensor", "8", "--topology", "medha-a100", *sweep) == 0
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["baseline"], row["error"], row["requests"]) for row in rows] == [(name, "", "12") for name in names]
    assert all(0 < float(row["usage.mfu"]) < 1 for row in rows)
    assert len({row["ttft.p90"] for row in rows}) > 2


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert simulate(*SMALL, *PLAN, "--json", str(tmp_path / name)) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert simulate(*SMALL, *PLAN, "--seed", "1", "--json", str(tmp_path / "b")) == 0
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()


def test_a_measured_engine_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of 8 rows takes 10 ms, one of 16 rows 20 ms: a prompt of 40 tokens 20 + 20 + 10.

    A step has as many rows as the profile's.
    """
    profile, results, model = (
        tmp_path / "profile.json",
        tmp_path / "all.json",
        LlamaConfig.from_hf(TINY / "config.json"),
    )
    subject = {
        "num_layers": model.num_layers,
        "device": "abacus",
        "page_size": 16,
        "max_running": 4,
        "buckets": [8, 16],
    }
    save_profile(profile, RuntimePredictor.of_rows({8: 0.01, 16: 0.02}, (1,), (0.0,)), subject)
    sizes = ["--page-size", "16", "--max-running", "4", "--topology", "cpu"]
    workload = ["--requests", "1", "--prompt-tokens", "40", "--output-tokens", "3"]
    arguments = ["--model", str(TINY), *workload, *sizes, "--profile", str(profile)]
    assert simulate(*arguments, "--json", str(results)) == 0
    summary = json.loads(results.read_text())["summary"]
    assert summary["ttft"]["p50"] == pytest.approx(0.05)
    assert summary["tpot"]["p50"] == pytest.approx(0.01)
    assert simulate(*arguments, "--page-size", "32") == 2
    assert "was measured on another engine: --page-size is 16 there, 32 here" in capsys.readouterr().err
    assert simulate(*arguments, "--tensor", "2") == 2
    assert "was measured on one device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ([], saturating_rows(MODELS["llama-3-8b"], Topology.preset("h100-rdma"))),
        (["--tensor=8"], saturating_rows(MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8))),
        (["--max-running=1000"], 1000),
        (["--token-budget=256"], 256),
        (["--preset=sarathi"], 512),
        (["--preset=medha"], 4096),
        (["--preset=medha", "--token-budget=1024"], 1024),
        (["--buckets=64,128"], 128),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_token_budget_follows_from_the_hardware(
    flags: list[str], rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless a flag says how many rows a step has; what follows is printed."""
    results = tmp_path / "all.json"
    assert simulate("--requests", "2", *flags, "--json", str(results)) == 0
    assert json.loads(results.read_text())["config"]["token_budget"] == rows
    is_printed = f"budget   {rows:,} rows a step" in capsys.readouterr().out
    assert is_printed == (not any("budget" in each or "preset" in each or "buckets" in each for each in flags))
