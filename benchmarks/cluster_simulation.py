"""How fast simulated clusters are: `python -m benchmarks.cluster_simulation TRACE`.

`TRACE` is Mooncake's `conversation_trace.jsonl` (docs/simulation.md says where it comes from). Seconds are of one
process, by the clock of its processor and by that of the wall.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from longctx.cluster.conductor.config import ConductorConfig
from longctx.parallel.topology import Topology
from longctx.serving import ParallelPlan
from longctx.simulation.cluster import ClusterDeployment, ClusterRecord, PrefixTreeRoute
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import read_workload

APART, COUPLED = {"prefill": 8, "decode": 8}, {"coupled": 16}
CASES: dict[str, tuple[dict[str, int], Any, Any]] = {
    "8P+8D, kvcache_centric": (APART, "kvcache_centric", "none"),
    "8P+8D, cache_aware": (APART, "cache_aware", "none"),
    "8P+8D, random": (APART, "random", "none"),
    "8P+8D, predicted early rejection": (APART, "kvcache_centric", "predicted_early_rejection"),
    "16 coupled, least_loaded": (COUPLED, "least_loaded", "none"),
    "16 coupled, vllm-router's rule": (COUPLED, PrefixTreeRoute(), "none"),
}


def deployment(counts: dict[str, int], policy: Any, admission: Any) -> ClusterDeployment:
    """LLaMA2-70B, each instance on 8 A800 (Mooncake, 7.1)."""
    config = ConductorConfig(policy=policy, admission=admission)
    topology = Topology.preset("a100-800g")
    return ClusterDeployment(MODELS["llama-2-70b"], topology, ParallelPlan(tensor=8), config=config, **counts)  # type: ignore[arg-type]


def measure(about: str, made: ClusterDeployment, requests: list[Any]) -> dict[str, Any]:
    """Simulate once, and time it."""
    wall, cpu = time.perf_counter(), time.process_time()
    record = made.run(requests)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"about": about, "cpu": cpu, "wall": wall, **outcome(record)}


def outcome(record: ClusterRecord) -> dict[str, Any]:
    predicted = np.mean([each.assignment.ttft for each in record.placed])
    return {
        "steps": record.totals.steps,
        "served": len(record.served),
        "rejected": len(record.rejected),
        "ttft": float(np.mean([each.ttft for each in record.served])),
        "predicted": float(predicted),
        "tbt": float(np.mean([each.tbt for each in record.placed if each.tbt is not None])),
        "hit_rate": record.hit_rate,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """In markdown."""
    lines = [
        "| cluster | CPU s | wall s | steps | served | rejected | mean TTFT | predicted | mean TBT | cached |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        told = [f"{row['cpu']:.1f}", f"{row['wall']:.1f}", *(f"{row[x]:,}" for x in ("steps", "served", "rejected"))]
        told += [f"{row['ttft']:.2f} s", f"{row['predicted']:.2f} s", f"{1e3 * row['tbt']:.1f} ms"]
        lines.append(f"| {row['about']} | {' | '.join(told)} | {row['hit_rate']:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path, help="of Mooncake")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--requests", type=int, help="of the trace, at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    requests, rows = read_workload(options.trace, options.requests), []
    for name in options.cases:
        rows.append(measure(name, deployment(*CASES[name]), requests))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
