"""How fast the simulator is, and where its time goes: `python -m benchmarks.simulation DATA`.

`DATA` is a folder with `mixes/merged_df_5_percent_long_context_mixed.csv` (lengths of Medha's evaluation, 5 % of them
long) and `mooncake/conversation_trace.jsonl` (Mooncake's trace, 12,031 requests of an hour); docs/simulation.md says
where they come from.

Seconds are of one process, by the clock of its processor and by that of the wall. An event is a turn of the loop; a
step, a batch of an engine. Runs of identical decode-only steps are one event. Where the time goes is measured in a
second run with fewer requests, by `cProfile`, whose own work makes functions that are called often look slower.
"""

import argparse
import cProfile
import dataclasses
import json
import pstats
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.simulation import Instance, Record, Simulation
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, read_workload

MIX = "mixes/merged_df_5_percent_long_context_mixed.csv"
TRACE = "mooncake/conversation_trace.jsonl"
RATE = 0.5  # requests a second, below what 16 A100 can serve of the mix
BACKLOG, SERVED = 3000, 0.6  # requests that come at once; others come about as fast as they are served
# The first folder of a module's path below `longctx` that says what a function is for.
PARTS = {
    "pages": ("serving/kv_cache", "growth", "page_", "running", "prefix_wait", "tokenless"),
    "prediction": ("serving/predictor", "prompt_time", "rank_work", "exchange_rule"),
    "scheduling": ("serving/scheduler",),
    "repeated decodes": ("repeated_steps", "numpy"),
    "requests and results": ("serving/request", "serving/engine", "serving/executor"),
    "loop": ("simulation",),
}


class Case(NamedTuple):
    """A workload and the engines that it is simulated on."""

    about: str
    file: str
    num_requests: int
    arrive: Callable[[list[WorkloadRequest]], list[WorkloadRequest]]
    make: Callable[[], list[Instance]]
    asked: float  # seconds, at most


def medha(chunking: str, policy: str) -> list[Instance]:
    """Llama-3 8B on 16 A100: eight share a layer, in two stages."""
    model, plan, page = MODELS["llama-3-8b"], ParallelPlan(stage=2, tensor=8), 256
    # 60 GB of each GPU for keys and values, 131,072 bytes a token.
    config = EngineConfig(
        page_size=page,
        num_pages=16 * 60 * 10**9 // (131_072 * page),
        max_running=256,
        token_budget=4096,
        policy=policy,
        chunking=chunking,
        slo=Slo(tpot=0.05),
        prefix_cache=False,
        run_ahead=1,
    )
    return [Instance(model, config, predictor(model, "medha-a100", plan, max_rows=4096), plan)]


def mooncake(count: int = 16) -> list[Instance]:
    """LLaMA2-70B, each on 8 A800; pages are blocks of the trace."""
    model, plan, page = MODELS["llama-2-70b"], ParallelPlan(tensor=8), 512
    # 40 GB of each GPU for keys and values, 327,680 bytes a token.
    config = EngineConfig(
        page_size=page,
        num_pages=8 * 40 * 10**9 // (327_680 * page),
        max_running=64,
        token_budget=4096,
        policy="fcfs",
        chunking="static",
        slo=Slo(tpot=0.1),
        run_ahead=1,
    )
    times = predictor(model, "a100-800g", plan, max_rows=4096)
    return [Instance(model, config, times, plan, name=str(number)) for number in range(count)]


def arrive(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    return arrive_at_rate(requests, RATE)


def arrive_with_backlog(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    first, later = requests[:BACKLOG], arrive_at_rate(requests[BACKLOG:], SERVED)
    return [dataclasses.replace(request, arrival=0.0) for request in first] + later


CASES = {
    "mix": Case("5 % mix, chunks of 4,096", MIX, 10_000, arrive, lambda: medha("static", "ilrs"), 30),
    "backlog": Case("5 % mix, 3,000 waiting", MIX, 10_000, arrive_with_backlog, lambda: medha("static", "ilrs"), 120),
    "adaptive": Case("5 % mix, adaptive chunks", MIX, 10_000, arrive, lambda: medha("adaptive", "ilrs"), 30),
    "trace": Case("conversations, 16 instances", TRACE, 12_031, list, mooncake, 20),
}


def measure(case: Case, requests: list[WorkloadRequest]) -> dict[str, Any]:
    """Simulate once, and time it."""
    simulation = Simulation(case.make())
    wall, cpu = time.perf_counter(), time.process_time()
    record = simulation.run(requests, keep_steps=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "about": case.about,
        "requests": len(requests),
        "seconds": cpu,
        "wall": wall,
        "asked": case.asked,
        "events": simulation.loop.num_events,
        "steps": record.totals.steps,
        "simulated": record.seconds,
        "waited": most_waiting(record),
    }


def most_waiting(record: Record) -> int:
    """The most requests that had come and had no memory yet, at a time."""
    changes = [(served.metrics.arrival, 1) for served in record.served]
    changes += [(served.metrics.admitted or 0.0, -1) for served in record.served]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def profile(case: Case, requests: list[WorkloadRequest]) -> dict[str, float]:
    """Shares of the time of each of `PARTS`; what Python's own functions take counts for who calls them."""
    simulation, profiler = Simulation(case.make()), cProfile.Profile()
    profiler.runcall(simulation.run, requests, keep_steps=False)
    seconds = Counter[str]()
    for (file, _, _), (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if "longctx" in file or "numpy" in file:
            seconds[part_of(file)] += own
            continue
        for (caller, _, _), (_, _, here, _) in callers.items():
            seconds[part_of(caller)] += here
    total = sum(seconds.values())
    return {part: seconds[part] / total for part in [*PARTS, "other"]}


def part_of(file: str) -> str:
    path = file.rpartition("longctx/")[2]
    return next((part for part, names in PARTS.items() if any(name in path for name in names)), "other")


def table(rows: list[dict[str, Any]]) -> str:
    """In markdown: seconds here, and what was simulated."""
    lines = [
        "| workload | requests | CPU s | wall s | asked | events | steps | steps/s | events/s | simulated | waiting |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        cpu = row["seconds"]
        told = [f"{cpu:.1f}", f"{row['wall']:.1f}", f"{row['asked']:g}", f"{row['events']:,}", f"{row['steps']:,}"]
        told += [f"{row[name] / cpu:,.0f}" for name in ("steps", "events")]
        told += [f"{row['simulated']:,.0f}", f"{row['waited']:,}"]
        lines.append(f"| {row['about']} | {row['requests']:,} | {' | '.join(told)} |")
    parts = [*PARTS, "other"]
    lines += ["", f"| workload | {' | '.join(parts)} |", "|---|" + "---|" * len(parts)]
    for row in rows:
        shares = " | ".join(f"{row['parts'][part]:.0%}" for part in parts)
        lines.append(f"| {row['about']} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of the workloads")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--requests", type=int, help="of each workload, at most; default: as asked")
    parser.add_argument("--profiled", type=int, default=1000, help="requests of the run that is profiled")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.cases:
        case = CASES[name]
        requests = case.arrive(read_workload(options.data / case.file, options.requests or case.num_requests))
        row = measure(case, requests)
        print(f"{row['about']}: {row['seconds']:.1f} s", flush=True)
        rows.append(row | {"parts": profile(case, requests[: options.profiled])})
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
