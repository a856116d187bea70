"""Coding agents through a cluster: `python -m benchmarks.agents [--parts simulated real] [--sessions N]`.

Sessions are drawn with the statistics of public traces (`longctx.simulation.workloads.make_agent_sessions`), or read
from AIPerf's agentic traces by `--trace`. Of each cluster: time to the first token of a session's first turn, of turns
after it, and of those for which it is late (p99); and the share of the prompts' tokens that was found in a cache,
beside that of an unlimited cache.

- `simulated`: LLaMA-3-70B on 8 H100 in virtual time. Predictions: nothing is measured.
- `real`: two processes of the built-in model behind `longctx serve --cluster` on this machine, all lengths divided by
  32 and times between turns by 10, short sessions, as `longctx bench --url` sends them.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.trace import short_agent_sessions
from benchmarks.server_process import Process, serve_command
from longctx.cluster.conductor.config import ConductorConfig
from longctx.parallel.topology import Topology
from longctx.serving import ParallelPlan
from longctx.simulation.deployment import ClusterDeployment
from longctx.simulation.http_replay import find_model, make_http_client, replay_http
from longctx.simulation.models import MODELS
from longctx.simulation.record import Record
from longctx.simulation.workloads import (
    WorkloadRequest,
    arrive_at_rate,
    ideal_hit_rate,
    make_agent_sessions,
    read_workload,
    scale_lengths,
)

GB = 10**9
SIMULATED: dict[str, dict[str, Any]] = {
    "2 that do both, devices alone": {"coupled": 2},
    "2 that do both, 1 TB of host memory each": {"coupled": 2, "coupled_host_bytes": 1000 * GB},
    "1 prefill, 1 decode, devices alone": {"prefill": 1, "decode": 1, "host_bytes": 0},
    "1 prefill, 1 decode, 1 TB": {"prefill": 1, "decode": 1, "host_bytes": 1000 * GB},
}
REAL = {"devices alone": [], "256 MiB of host memory each": ["kv-host-bytes = 268435456"]}
SCALE = 32
ENGINE = """[cluster]
policy = "kvcache_centric"
admission = "none"
[engine]
max-length = 16384
num-pages = 256
max-running = 16
token-budget = 256
buckets = "8,64,256"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("simulated", "real"), default=["simulated", "real"])
    parser.add_argument("--sessions", type=int, default=20, help="of each part")
    parser.add_argument("--trace", type=Path, help="AIPerf's agentic traces instead: .json, .jsonl or a folder")
    parser.add_argument("--jobs", type=int, default=2, help="processes that simulate")
    options = parser.parse_args()
    print("| cluster | turns | TTFT of first turns, P50 | later turns, P50 | P90 | P99 | hit rate | of the ideal |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    if "simulated" in options.parts:
        requests = make_agent_sessions(options.sessions) if options.trace is None else read_workload(options.trace)
        requests = arrive_at_rate(requests, 0.1)
        with ProcessPoolExecutor(options.jobs) as pool:
            for name, record in zip(SIMULATED, pool.map(partial(simulate, requests), SIMULATED), strict=True):
                print(row(f"{name} (predicted)", requests, record), flush=True)
    if "real" in options.parts:
        requests = short_sessions(options.sessions)
        for name, lines in REAL.items():
            print(row(f"2 processes, {name}", requests, serve(requests, lines)), flush=True)


def simulate(requests: Sequence[WorkloadRequest], name: str) -> Record:
    """Serve the sessions in virtual time on one of `SIMULATED`."""
    config = ConductorConfig(policy="kvcache_centric", admission="none", ttft=30.0, tpot=0.1)
    plan, topology = ParallelPlan(tensor=4), Topology.preset("h100-rdma")
    deployment = ClusterDeployment(
        MODELS["llama-3-70b"], topology, plan, coupled_chunk=2048, config=config, **SIMULATED[name]
    )
    return deployment.simulation().run(requests)


def short_sessions(count: int) -> list[WorkloadRequest]:
    """Draw sessions of up to 20 turns for a small model, one every 3 s."""
    return arrive_at_rate(scale_lengths(short_agent_sessions(count), 1 / SCALE), 1 / 3)


def serve(requests: Sequence[WorkloadRequest], lines: Sequence[str]) -> Record:
    """Send the sessions to a cluster of two processes, whose engines have these flags too."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cluster.toml")
        instances = '[[instances]]\nname = "agent"\nrole = "both"\ncount = 2\n'
        file.write_text("\n".join([ENGINE, *lines, instances]))
        command = serve_command("--cluster", str(file))
        with Process("cluster", command, Path(folder, "log"), environment={"JAX_PLATFORMS": "cpu"}) as router:
            return asyncio.run(_send(router.url, requests))


async def _send(url: str, requests: Sequence[WorkloadRequest]) -> Record:
    async with make_http_client(url) as client:
        model, _ = await find_model(client)
        record = await replay_http(client, model, requests)
    if record.failed:
        raise RuntimeError(f"{record.failed} requests failed: {dict(record.errors)} {record.first_error}")
    return record


def row(name: str, requests: Sequence[WorkloadRequest], record: Record) -> str:
    """Return the line of a table; times are in seconds."""
    firsts = {request.number for request in requests if request.after is None}
    first = [served.ttft for served in record.served if served.number in firsts]
    later = [served.ttft for served in record.served if served.number not in firsts]
    times = [np.median(first), *np.percentile(later, (50, 90, 99))]
    ideal = ideal_hit_rate(requests)
    shown = " | ".join(f"{seconds:.2f} s" for seconds in times)
    return f"| {name} | {len(record.served):,} | {shown} | {record.hit_rate:.1%} | {record.hit_rate / ideal:.1%} |"


if __name__ == "__main__":
    main()
