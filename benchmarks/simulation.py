"""How fast the simulator is, and where its time goes: `python -m benchmarks.simulation DATA`.

`DATA` is a folder with `mixes/merged_df_5_percent_long_context_mixed.csv` (lengths of Medha's evaluation, 5 % of them
long) and `mooncake/conversation_trace.jsonl` (Mooncake's trace, 12,031 requests of an hour); docs/simulation.md says
where they come from.

Seconds are of one process, by the clock of its processor and by that of the wall. An event is a turn of the loop; a
step, a batch of an engine. Runs of identical decode-only steps are one event.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from longctx.cluster.conductor.config import ConductorConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.simulation import Instance, Record, Simulation
from longctx.simulation.deployment import ClusterDeployment
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, read_workload

MIX = "mixes/merged_df_5_percent_long_context_mixed.csv"
TRACE = "mooncake/conversation_trace.jsonl"
RATE = 0.5  # requests a second, below what 16 A100 can serve of the mix
BACKLOG, SERVED = 3000, 0.6  # requests that come at once; others come about as fast as they are served


class Case(NamedTuple):
    """A workload and the engines that it is simulated on."""

    about: str
    file: str
    num_requests: int
    arrive: Callable[[list[WorkloadRequest]], list[WorkloadRequest]]
    make: Callable[[], Simulation]
    asked: float  # seconds, at most


def medha(chunking: str) -> Simulation:
    """Llama-3 8B on 16 A100: eight share a layer, in two stages."""
    model, plan, page = MODELS["llama-3-8b"], ParallelPlan(stage=2, tensor=8), 256
    # 60 GB of each GPU for keys and values, 131,072 bytes a token.
    config = EngineConfig(
        page_size=page,
        num_pages=16 * 60 * 10**9 // (131_072 * page),
        max_running=256,
        token_budget=4096,
        policy="ilrs",
        chunking=chunking,
        slo=Slo(tpot=0.05),
        prefix_cache=False,
        run_ahead=1,
    )
    return Simulation([Instance(model, config, predictor(model, "medha-a100", plan, max_rows=4096), plan)])


def mooncake() -> Simulation:
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
    return Simulation([Instance(model, config, times, plan, name=str(number)) for number in range(16)])


def cluster(policy: str, **counts: int) -> Simulation:
    """LLaMA2-70B behind a conductor, each instance on 8 A800 (Mooncake, 7.1)."""
    config, plan = ConductorConfig(policy=policy, admission="none"), ParallelPlan(tensor=8)
    topology = Topology.preset("a100-800g")
    return ClusterDeployment(MODELS["llama-2-70b"], topology, plan, config=config, **counts).simulation()  # type: ignore[arg-type]


def arrive(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    return arrive_at_rate(requests, RATE)


def arrive_with_backlog(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    first, later = requests[:BACKLOG], arrive_at_rate(requests[BACKLOG:], SERVED)
    return [dataclasses.replace(request, arrival=0.0) for request in first] + later


CASES = {
    "mix": Case("5 % mix, chunks of 4,096", MIX, 10_000, arrive, lambda: medha("static"), 30),
    "backlog": Case("5 % mix, 3,000 waiting", MIX, 10_000, arrive_with_backlog, lambda: medha("static"), 120),
    "adaptive": Case("5 % mix, adaptive chunks", MIX, 10_000, arrive, lambda: medha("adaptive"), 40),
    "trace": Case("conversations, 16 instances", TRACE, 12_031, list, mooncake, 10),
    "apart": Case(
        "conversations, 8P+8D", TRACE, 12_031, list, lambda: cluster("kvcache_centric", prefill=8, decode=8), 50
    ),
    "coupled": Case("conversations, 16 coupled", TRACE, 12_031, list, lambda: cluster("least_loaded", coupled=16), 50),
}


def measure(case: Case, requests: list[WorkloadRequest]) -> str:
    """Simulate once, and time it: a line of the table, seconds here and what was simulated."""
    simulation = case.make()
    wall, cpu = time.perf_counter(), time.process_time()
    record = simulation.run(requests, keep_steps=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    events, steps = simulation.loop.num_events, record.totals.steps
    told = [f"{cpu:.1f}", f"{wall:.1f}", f"{case.asked:g}", f"{events:,}", f"{steps:,}", f"{steps / cpu:,.0f}"]
    told += [f"{events / cpu:,.0f}", f"{record.seconds:,.0f}", f"{most_waiting(record):,}"]
    return f"| {case.about} | {len(requests):,} | {' | '.join(told)} |"


def most_waiting(record: Record) -> int:
    """The most requests that had come and had no memory yet, at a time."""
    changes = [(served.metrics.arrival, 1) for served in record.served]
    changes += [(served.metrics.admitted or 0.0, -1) for served in record.served]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of the workloads")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="of the table; default: all")
    parser.add_argument("--requests", type=int, help="of each workload, at most; default: as asked")
    options = parser.parse_args()
    print(
        "| workload | requests | CPU s | wall s | asked | events | steps | steps/s | events/s | simulated | waiting |"
    )
    print("|---" * 11 + "|", flush=True)
    for case in map(CASES.__getitem__, options.cases):
        requests = case.arrive(read_workload(options.data / case.file, options.requests or case.num_requests))
        print(measure(case, requests), flush=True)


if __name__ == "__main__":
    main()
