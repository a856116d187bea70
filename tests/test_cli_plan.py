"""The command `longctx plan`: plans that meet a target, why others do not, and the command that serves the winner."""

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from longctx.cli import command_parser, main
from longctx.cli.plan import serve_command, tokens
from longctx.cli.settings import engine_config, given_topology, parallel_plan
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.simulation.deployment import Deployment
from longctx.simulation.models import MODELS
from longctx.simulation.planner.prompt import PromptPredictor, simulate_prompt
from longctx.simulation.planner.search import Goal, Planned, RejectedPlan, evaluate, layouts, search

LLAMA, RDMA = MODELS["llama-3-8b"], Topology.preset("h100-rdma")
TARGET = ["--gpus", "4", "--context", "128K", "--ttft", "10", "--tpot", "0.05"]


def plan(*arguments: str) -> int:
    return main(["plan", "--quiet", *arguments])


def parsed(command: str) -> argparse.Namespace:
    """The flags of a `longctx serve` command."""
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("longctx", "serve")
    return command_parser("serve").parse_args(arguments)


def test_the_best_plans_meet_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "plans.json"
    assert plan(*TARGET, "--price", "2", "--json", str(results)) == 0
    printed = capsys.readouterr().out
    found = json.loads(results.read_text())
    assert 1 <= len(found["plans"]) <= 10
    costs = [each["gpu_seconds"] for each in found["plans"]]
    assert costs == sorted(costs)
    for each in found["plans"]:
        assert each["prompt"]["ttft"] <= 10
        assert max(each["prompt"]["tpot"], each["prompt"]["beside"]) <= 0.05 * (1 + 1e-6)
        assert 0 < each["mfu"] < 1
        sizes = [each["plan"][axis] for axis in ("stage", "context", "tensor")]
        assert sizes[0] * sizes[1] * sizes[2] * each["instances"] <= 4
    assert all(each["reason"] in ("memory", "link", "TPOT", "TTFT") for each in found["fallen"])
    # What the serving core does is what was predicted.
    assert found["simulated"]["ttft"] == pytest.approx(found["plans"][0]["prompt"]["ttft"], rel=0.05)
    assert found["simulated"]["tpot"] == pytest.approx(found["plans"][0]["prompt"]["tpot"], rel=0.05)
    command = next(line for line in printed.splitlines() if line.startswith("serve  "))
    assert parsed(command.removeprefix("serve  ")).stage == found["plans"][0]["plan"]["stage"]


def goal_and_deployment(plan: ParallelPlan, chunking: str) -> tuple[Goal, Deployment]:
    goal = Goal(200_000, 100.0, 0.05, 16)
    config = EngineConfig(
        max_length=300_000, token_budget=2048, chunking=chunking, slo=Slo(tpot=goal.tpot, step_seconds=goal.tpot)
    )
    return goal, Deployment(LLAMA, RDMA, plan, config)


@pytest.mark.parametrize(
    ("plan", "chunking"),
    [
        (ParallelPlan(tensor=8), "adaptive"),
        (ParallelPlan(stage=4, tensor=2), "adaptive"),
        (ParallelPlan(stage=4, tensor=2), "static:512"),
        (ParallelPlan(context=4, tensor=2, exchange="kvp", rank_tokens=50_048), "adaptive"),
        (ParallelPlan(stage=2, context=2, tensor=2, exchange="kvp", rank_tokens=25_024), "adaptive"),
        (ParallelPlan(context=4, tensor=2, placement="interleave", exchange="pass_kv"), "static:2048"),
    ],
    ids=str,
)
def test_predictions_are_what_the_core_does(plan: ParallelPlan, chunking: str) -> None:
    goal, deployment = goal_and_deployment(plan, chunking)
    predicted = PromptPredictor(deployment).predict(goal.context, goal.output_tokens)
    simulated = simulate_prompt(deployment, goal.context, goal.output_tokens, predicted.steps)
    assert simulated.ttft == pytest.approx(predicted.ttft, rel=0.05)
    assert simulated.tpot == pytest.approx(predicted.tpot, rel=0.05)
    assert simulated.beside <= predicted.beside * 1.001
    assert simulated.largest <= predicted.largest


@pytest.mark.parametrize(
    ("model", "plan", "goal", "reason"),
    [
        ("llama-3-70b", ParallelPlan(tensor=1), Goal(1000, 10, 1), "memory"),
        ("llama-3-8b", ParallelPlan(), Goal(1_000_000, 1000, 1), "memory"),
        ("llama-3-8b", ParallelPlan(tensor=8), Goal(1_000_000, 1000, 0.001), "TPOT"),
        ("llama-3-8b", ParallelPlan(tensor=8), Goal(100_000, 0.1, 1), "TTFT"),
    ],
)
def test_a_plan_falls_for_a_reason(model: str, plan: ParallelPlan, goal: Goal, reason: str) -> None:
    found = evaluate(MODELS[model], RDMA, 8, goal, plan, "adaptive", 2048)
    assert isinstance(found, RejectedPlan)
    assert found.reason == reason
    assert found.excess > 1


def test_a_slow_link_is_why_a_plan_falls() -> None:
    """The same plan does where the link is fast."""
    goal, spread = Goal(100_000, 3.5, 1), ParallelPlan(context=8, placement="interleave", exchange="pass_kv")
    found = {
        name: evaluate(LLAMA, Topology.preset(name), 8, goal, spread, "static:4096", 4096)
        for name in ("h100-nvlink", "h100-tcp")
    }
    assert isinstance(found["h100-nvlink"], Planned)
    assert isinstance(found["h100-tcp"], RejectedPlan)
    assert found["h100-tcp"].reason == "link"
    no_link = Topology(RDMA.device, {"tensor": RDMA.links["tensor"]})
    found_none = evaluate(LLAMA, no_link, 8, goal, spread, "static:4096", 4096)
    assert isinstance(found_none, RejectedPlan)
    assert found_none.reason == "link"


def test_the_serve_command_has_the_plan_s_settings() -> None:
    found = search(LLAMA, RDMA, 2, Goal(50_000, 20.0, 0.1), kv_dtype="float8_e4m3fn")
    options = argparse.Namespace(model="llama-3-8b", topology="h100-rdma")
    assert any(planned.deployment.plan.context > 1 for planned in found.plans)
    for planned in found.plans:
        flags = parsed(serve_command(planned, options))
        assert parallel_plan(flags) == planned.deployment.plan
        assert engine_config(flags, max_logprobs=EngineConfig.max_logprobs) == planned.deployment.config
        assert given_topology(flags) == (RDMA if planned.devices > 1 else None)


def test_layouts_suit_the_model_and_the_devices() -> None:
    found = list(layouts(LLAMA, 12, 100_000, 8))
    assert {plan.num_devices for plan in found} >= {1, 2, 4, 6, 12}
    assert max(plan.num_devices for plan in found) == 12
    assert {plan.tensor for plan in found} <= {1, 2, 4, 8}  # heads are divided
    assert {plan.stage for plan in found} >= {1, 2, 3, 12}


def test_a_workload_is_served_by_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, results = tmp_path / "lengths.csv", tmp_path / "plans.json"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "2000,20\n" * 8)
    more = [
        "--workload",
        str(lengths),
        "--qps",
        "4",
        "--best",
        "2",
        "--jobs",
        "1",
        "--no-check",
        "--json",
        str(results),
    ]
    assert plan(*TARGET, *more) == 0
    assert "in time" in capsys.readouterr().out
    plans = json.loads(results.read_text())["plans"]
    assert [each["workload"]["requests"] for each in plans] == [8, 8]
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n2000000,20\n")
    assert plan(*TARGET, *more) == 2
    assert "--workload has a request of 2,000,020 tokens" in capsys.readouterr().err


_ESTIMATOR = """\
import json, pathlib, sys
arguments = sys.argv[1:]
flags = dict(zip(arguments[2::2], arguments[3::2], strict=True))
model = json.loads(pathlib.Path(flags["--model-path"], "config.json").read_text())
with pathlib.Path(__file__).with_suffix(".json").open("a") as log:
    print(json.dumps(arguments[:2] + [flags, model]), file=log)
if flags["--tp-size"] == "4":
    print("  a traceback", "ValueError: no table of these", "", sep="\\n", file=sys.stderr)
    sys.exit(1)
print("=====", "  ISL:   128000", "  TTFT:             1234.5 ms", "  TPOT:             6.5 ms", sep="\\n")
"""


@pytest.fixture
def estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Log of a program on PATH that prints as AIConfigurator does; with four tensor ranks it fails."""
    program = tmp_path / "estimator.py"
    program.write_text(_ESTIMATOR)
    start = tmp_path / "bin" / "aiconfigurator"
    start.parent.mkdir()
    start.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(program))} "$@"\n')
    start.chmod(0o755)
    monkeypatch.setenv("PATH", f"{start.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # beside it there is no real one
    return program.with_suffix(".json")


def test_a_second_opinion_is_beside_each_plan(
    estimator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "plans.json"
    assert plan(*TARGET, "--compare", "--kv-dtype", "float8_e4m3fn", "--no-check", "--json", str(results)) == 0
    printed, found = capsys.readouterr().out, json.loads(results.read_text())
    head, *rows = printed.splitlines()[: len(found["plans"]) + 1]
    at = head.index("AIC TTFT")
    asked = [json.loads(line) for line in estimator.read_text().splitlines()]
    for row, each, opinion in zip(rows, found["plans"], found["aiconfigurator"], strict=True):
        sizes = {axis: each["plan"][axis] for axis in ("stage", "context", "tensor")}
        if sizes["context"] > 1 or sizes["tensor"] == 4:
            assert row[at:].split() == ["-", "-"]
            assert opinion.keys() == {"error"}
        else:
            assert row[at:].split() == ["1.23", "s", "6.5", "ms"]
            assert opinion == {"ttft": pytest.approx(1.2345), "tpot": pytest.approx(0.0065)}
        if sizes["context"] == 1:
            (flags,) = [
                flags
                for *_, flags, _ in asked
                if (flags["--pp-size"], flags["--tp-size"]) == (str(sizes["stage"]), str(sizes["tensor"]))
            ]
            assert flags["--ctx-tokens"] == str(each["prompt"]["largest"])
    for *words, flags, model in asked:
        assert words == ["cli", "estimate"]
        assert (flags["--system"], flags["--isl"], flags["--osl"]) == ("h100_sxm", "128000", "256")
        assert (flags["--kvcache-quant-mode"], flags["--batch-size"]) == ("fp8", "1")
        assert (model["architectures"], model["num_hidden_layers"]) == (["LlamaForCausalLM"], 32)
    assert "AIConfigurator has no estimate: ValueError: no table of these\n" in printed
    assert "AIConfigurator has no estimate: plans with context ranks are not among its own\n" in printed


def test_a_second_opinion_needs_its_program_and_its_devices(
    estimator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*TARGET, "--compare", "--hardware", "meta-gtt") == 2
    assert "--compare: AIConfigurator is asked about H100, H200, A100, not H100-500W" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(estimator.parent))
    assert plan(*TARGET, "--compare") == 2
    assert "--compare needs the program `aiconfigurator` on PATH" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aiconfigurator") is None, reason="needs aiconfigurator")
def test_aiconfigurator_agrees_with_plans_of_one_device(tmp_path: Path) -> None:
    """Both know the same measured operators."""
    results, target = tmp_path / "plans.json", ["--gpus", "1", "--context", "32K", "--ttft", "10", "--tpot", "0.05"]
    assert plan(*target, "--compare", "--no-check", "--json", str(results)) == 0
    found = json.loads(results.read_text())
    for each, opinion in zip(found["plans"], found["aiconfigurator"], strict=True):
        assert opinion["ttft"] == pytest.approx(each["prompt"]["ttft"], rel=0.3)
        assert opinion["tpot"] == pytest.approx(each["prompt"]["tpot"], rel=0.3)


def test_no_plan_meets_a_target_that_is_out_of_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpus", "2", "--context", "1M", "--ttft", "0.1", "--tpot", "0.001") == 1
    printed = capsys.readouterr().out
    assert printed.startswith("no plan meets the target; the nearest:\n")
    assert "0 plans and ways to chunk meet the target" in printed


def test_tokens_are_parsed() -> None:
    assert [tokens(text) for text in ("4096", "128K", "1.5M", "10m")] == [4096, 128_000, 1_500_000, 10_000_000]
