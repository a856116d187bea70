"""`longctx plan`: search the parallel plan of a model on a number of GPUs."""

import argparse
import collections
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longctx.cli.flags import flag, prefixing, refuse
from longctx.cli.settings import given_topology
from longctx.cli.terminal import FAILED, Console
from longctx.cli.workload import named_model
from longctx.models.config import LlamaConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.simulation.planner.prompt import Prompt, simulate_prompt
from longctx.simulation.planner.search import Goal, Planned, RejectedPlan, SearchResult, search
from longctx.simulation.reports.report import summarize_deployment
from longctx.simulation.sweep import run_in_processes
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, read_workload

_UNITS = {"": 1, "K": 10**3, "M": 10**6}
_SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "A100": "a100_sxm"}  # AIConfigurator's names, by devices' names
_ESTIMATE = re.compile(r"^\s*(TTFT|TPOT):\s*([\d.]+) ms", re.MULTILINE)
_ESTIMATE_TIMEOUT = 600.0  # seconds; it takes about 10


def run(options: argparse.Namespace) -> int:
    """Search, and print the best plans and why others do not do."""
    if options.workload is None:
        refuse(options, ("limit", "rate"), "needs --workload")
    model, console = named_model(options.model), Console(options.quiet)
    topology = given_topology(options)
    assert topology is not None
    estimator = _estimator(topology.device.name) if options.compare else None
    requests = _requests(options)
    goal = Goal(tokens(options.context), options.ttft, options.tpot, options.output_tokens)
    with console.bar(desc="plans", unit="plan") as bar:

        def progress(left: int) -> None:
            bar.total = bar.n + 1 + left
            bar.update()

        found = search(model, topology, options.gpus, goal, options.host_gpus, progress, options.kv_dtype)
    best = found.best_of_each[: options.best]
    served: list[dict[str, Any] | None] = [None] * len(best)
    if requests:  # those first that keep most promises
        served = _serve(best, requests, options, console)
        order = sorted(range(len(best)), key=lambda at: (-((served[at] or {}).get("in_time") or 0.0), at))
        best, served = [best[at] for at in order], [served[at] for at in order]
    estimates: list[dict[str, Any]] = []
    if estimator is not None and best:
        estimates = _estimates(best, goal, model, estimator, options, console)
    print(_table(best, served, options.price, estimates) if best else _nearest(found, options))
    for text in dict.fromkeys(each["error"] for each in estimates if "error" in each):
        print(f"AIConfigurator has no estimate: {text}")
    print(f"\n{_rejections(found)}")
    checked = None
    if best:
        checked = None if options.no_check else _simulate(best[0], goal, console)
        print(f"\nserve  {serve_command(best[0], options)}")
    if options.json is not None:
        contents = {
            "goal": dataclasses.asdict(goal),
            "plans": [_plain(planned, summary) for planned, summary in zip(best, served, strict=True)],
            "aiconfigurator": estimates,
            "simulated": None if checked is None else checked._asdict(),
            "fallen": [
                each._asdict()
                | {"plan": dataclasses.asdict(each.plan), "excess": None if each.excess == math.inf else each.excess}
                for each in found.rejected
            ],
        }
        options.json.write_text(json.dumps(contents) + "\n", encoding="utf-8")
    return 0 if best else FAILED


def tokens(text: str) -> int:
    """Tokens from `1000000`, `1M` or `128K`; ValueError if it is something else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KM]?)", text.strip().upper())
    if match is None or float(match[1]) * _UNITS[match[2]] < 1:
        raise ValueError(f"--context must be tokens such as 1000000, 128K or 10M, got {text!r}")
    return round(float(match[1]) * _UNITS[match[2]])


def serve_command(planned: Planned, options: argparse.Namespace) -> str:
    """The command that serves a plan."""
    plan, config = planned.deployment.plan, planned.deployment.config
    flags: dict[str, Any] = {name: getattr(plan, name) for name in ("stage", "context", "tensor")}
    flags = {name: size for name, size in flags.items() if size > 1}
    if plan.context > 1:
        flags |= {"exchange": plan.exchange, "placement": plan.placement}
        flags |= {} if plan.rank_tokens is None else {"rank_tokens": plan.rank_tokens}
        flags |= {} if plan.ffn == "tensor" else {"ffn": plan.ffn}
    if plan.num_devices > 1:
        flags["topology"] = options.topology
    flags |= {} if config.kv_dtype is None else {"kv_dtype": config.kv_dtype}
    flags |= {name: getattr(config, name) for name in ("page_size", "max_length", "token_budget", "chunking")}
    flags |= {name: getattr(config.slo, name) for name in ("tpot", "tpot_factor", "step_seconds")}
    words = ["longctx", "serve", "--model", options.model]
    for name, value in flags.items():
        words += [flag(name), str(value)]
    return shlex.join(words)


def _requests(options: argparse.Namespace) -> list[WorkloadRequest]:
    if options.workload is None:
        return []
    requests = read_workload(options.workload, options.limit)
    if any(request.prompt is not None for request in requests):
        raise ValueError("--workload must have lengths, not prompts")
    longest = max(request.length for request in requests)
    most = tokens(options.context) + options.output_tokens
    if longest > most:
        raise ValueError(
            f"--workload has a request of {longest:,} tokens, more than the {most:,} of --context and --output-tokens"
        )
    return requests if options.rate is None else arrive_at_rate(requests, options.rate, options.seed)


def serve_workload(task: tuple[Planned, list[WorkloadRequest], int]) -> dict[str, Any]:
    """Serve a workload on all instances of a plan: a summary, or the `error` that says why it can't be."""
    planned, requests, seed = task
    try:
        record = planned.deployment.simulation().run(requests, seed, keep_steps=False)
    except ValueError as error:
        return {"error": str(error)}
    return summarize_deployment(record, planned.deployment)


def _serve(
    best: list[Planned], requests: list[WorkloadRequest], options: argparse.Namespace, console: Console
) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = [None] * len(best)
    tasks = [(planned, requests, options.seed) for planned in best]
    with console.bar(total=len(best), desc="workload", unit="plan") as bar, prefixing("--workload: "):
        for at, summary in run_in_processes(serve_workload, tasks, options.jobs or os.cpu_count() or 1):
            found[at] = summary
            bar.update()
    return found


def _estimator(device: str) -> list[str]:
    """The command that asks AIConfigurator; ValueError: it is not installed, or has no tables of the device."""
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    program = shutil.which("aiconfigurator", path=os.pathsep.join(folders))
    if program is None:
        raise ValueError("--compare needs the program `aiconfigurator` on PATH: pip install aiconfigurator")
    if device not in _SYSTEMS:
        raise ValueError(f"--compare: AIConfigurator is asked about {', '.join(_SYSTEMS)}, not {device}: --hardware")
    return [program, "cli", "estimate", "--system", _SYSTEMS[device], "--backend", "vllm"]


def estimate(planned: Planned, goal: Goal, command: list[str]) -> dict[str, Any]:
    """Ask AIConfigurator about a plan.

    Args:
      planned: whose sizes and largest chunk it is asked about.
      goal: whose request is alone in the engine.
      command: its program and first arguments, those of the model and the devices.

    Returns:
      Seconds of `ttft` and `tpot`, or the `error` that says why there are none.
    """
    plan = planned.deployment.plan
    if plan.context > 1:
        return {"error": "plans with context ranks are not among its own"}
    numbers = {"isl": goal.context, "osl": goal.output_tokens, "batch-size": 1, "ctx-tokens": planned.prompt.largest}
    numbers |= {"tp-size": plan.tensor, "pp-size": plan.stage}
    words = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    try:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=_ESTIMATE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    found = {name.lower(): float(number) / 1e3 for name, number in _ESTIMATE.findall(done.stdout)}
    if done.returncode or found.keys() != {"ttft", "tpot"}:
        lines = (done.stderr or done.stdout).split("\n")
        return {"error": next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")}
    return found


def _estimates(
    best: list[Planned],
    goal: Goal,
    model: LlamaConfig,
    command: list[str],
    options: argparse.Namespace,
    console: Console,
) -> list[dict[str, Any]]:
    """Ask AIConfigurator about plans, as vLLM would serve a model of these sizes."""
    with tempfile.TemporaryDirectory() as folder:
        contents = {name: value for name, value in model.to_hf().items() if name != "quantization_config"}
        Path(folder, "config.json").write_text(json.dumps(contents | {"torch_dtype": "bfloat16"}), encoding="utf-8")
        command = [*command, "--model-path", folder]
        command += [] if model.quantization is None else ["--gemm-quant-mode", "fp8"]
        command += [] if options.kv_dtype is None else ["--kvcache-quant-mode", "fp8"]
        workers = ThreadPoolExecutor(options.jobs or os.cpu_count() or 1)
        with workers, console.bar(total=len(best), desc="AIConfigurator", unit="plan") as bar:
            found = []
            for each in workers.map(lambda planned: estimate(planned, goal, command), best):
                found.append(each)
                bar.update()
    return found


def _simulate(planned: Planned, goal: Goal, console: Console) -> Prompt:
    """Simulate the winner, and print it beside what was predicted."""
    predicted = planned.prompt
    with console.bar(desc="simulated", unit="event", unit_scale=True) as bar:
        seen = simulate_prompt(
            planned.deployment, goal.context, goal.output_tokens, predicted.steps, lambda record: bar.update()
        )
    print(
        f"\nsimulated by the serving core, the first: TTFT {seen.ttft:.2f} s ({seen.ttft / predicted.ttft - 1:+.1%}), "
        f"TPOT {1e3 * seen.tpot:.1f} ms ({seen.tpot / predicted.tpot - 1:+.1%}), "
        f"of a request beside it {1e3 * seen.beside:.1f} ms on average, {seen.steps:,} steps"
    )
    return seen


def describe(plan: ParallelPlan) -> str:
    """A plan's sizes, and how its pages are placed."""
    sizes = f"{plan.stage} x {plan.context} x {plan.tensor}"
    if plan.context == 1:
        return sizes
    limit = "" if plan.rank_tokens is None else f" {plan.rank_tokens:,}"
    return f"{sizes} {plan.exchange} {plan.placement}{limit}{' ffn=all' if plan.ffn == 'all' else ''}"


def _table(
    best: list[Planned], served: list[dict[str, Any] | None], price: float | None, estimates: list[dict[str, Any]]
) -> str:
    head = ["stage x context x tensor", "GPUs", "chunks", "TTFT", "TPOT", "beside", "GB", "MFU", "GPU-s"]
    head += ["cost"] if price is not None else []
    head += ["AIC TTFT", "AIC TPOT"] if estimates else []
    head += ["TTFT p90", "TPOT p90", "in time"] if any(served) else []
    rows = []
    for at, (planned, summary) in enumerate(zip(best, served, strict=True)):
        prompt, config = planned.prompt, planned.deployment.config
        span = f"{prompt.smallest:,}-{prompt.largest:,}" if prompt.smallest < prompt.largest else f"{prompt.largest:,}"
        row = [describe(planned.deployment.plan), f"{planned.devices} x {planned.deployment.instances}"]
        row += [f"{config.chunking.partition(':')[0]} {span}", f"{prompt.ttft:.2f} s"]
        row += [f"{1e3 * seconds:.1f} ms" for seconds in (prompt.tpot, prompt.beside)]
        row += [f"{planned.memory / 1e9:.0f}/{planned.usable / 1e9:.0f}", f"{planned.mfu:.0%}"]
        row += [f"{planned.gpu_seconds:,.0f}"]
        row += [f"{planned.gpu_seconds / 3600 * price:.3g}"] if price is not None else []
        row += _estimated(estimates[at]) if estimates else []
        row += _served(summary) if any(served) else []
        rows.append(row)
    widths = [max(len(row[at]) for row in (head, *rows) if at < len(row)) for at in range(len(head))]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)) for row in (head, *rows))
    return "\n".join(map(str.rstrip, lines))


def _estimated(estimate: dict[str, Any]) -> list[str]:
    if "error" in estimate:
        return ["-", "-"]
    return [f"{estimate['ttft']:.2f} s", f"{1e3 * estimate['tpot']:.1f} ms"]


def _served(summary: dict[str, Any] | None) -> list[str]:
    if summary is None or "error" in summary:
        return [(summary or {}).get("error", "")]
    seconds = [summary[name] for name in ("ttft", "tpot")]
    shown = ["-" if found is None else f"{found['p90']:.3g} s" for found in seconds]
    return [*shown, "-" if summary["in_time"] is None else f"{summary['in_time']:.1%}"]


def _nearest(found: SearchResult, options: argparse.Namespace) -> str:
    """Describe the plans that come nearest where none meets the target."""
    nearest, seen = [], set()
    for each in found.rejected:
        if each.plan not in seen:
            nearest.append(f"  {describe(each.plan)}, {each.chunking}: {each.text}")
        seen.add(each.plan)
    return "\n".join(["no plan meets the target; the nearest:", *nearest[: options.best]])


def _rejections(found: SearchResult) -> str:
    """Describe how many plans are rejected for each reason, and the nearest of each."""
    counts = collections.Counter(each.reason for each in found.rejected)
    first: dict[str, RejectedPlan] = {}
    for each in found.rejected:
        first.setdefault(each.reason, each)
    lines = []
    for reason, count in counts.most_common():
        plan, chunking, _, text, _ = first[reason]
        lines.append(f"  {count:>4} by {reason:<7} such as {describe(plan)}, {chunking}: {text}")
    met, missed = len(found.plans), len(found.rejected)
    return "\n".join([f"{met} plans and ways to chunk meet the target, {missed} fall", *lines])


def _plain(planned: Planned, summary: dict[str, Any] | None) -> dict[str, Any]:
    config = planned.deployment.config
    return {
        "plan": dataclasses.asdict(planned.deployment.plan),
        "instances": planned.deployment.instances,
        "chunking": config.chunking,
        "token_budget": config.token_budget,
        "prompt": planned.prompt._asdict(),
        "memory": planned.memory,
        "mfu": planned.mfu,
        "gpu_seconds": planned.gpu_seconds,
        "workload": summary,
    }
