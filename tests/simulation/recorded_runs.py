"""Simulated runs in ten configurations, as digests: `python -m tests.simulation.recorded_runs --write`.

A change of structure must not change what is simulated. A digest covers when each request came, its first token, the
mean time of its later tokens and its instance, to nine significant digits, and what each instance computed.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from longctx.cluster.conductor.config import ConductorConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan
from longctx.simulation.cluster import Change, ClusterSettings
from longctx.simulation.deployment import ClusterDeployment, Deployment
from longctx.simulation.models import MODELS
from longctx.simulation.record import Record
from longctx.simulation.workloads import Lengths, arrive_at_rate, make_conversations, make_mix, synthesize
from papers.baselines import make_simulation

STORED = Path(__file__).with_suffix(".json")
_SMALL = MODELS["llama-3-8b"]
_SERVERS = ClusterSettings(first_token="decode", overlap="chunk", report_seconds=0.5, event_seconds=0.05)


def _engine(config: EngineConfig, plan: ParallelPlan, mix: str, rate: float, instances: int = 1) -> Record:
    deployment = Deployment(_SMALL, Topology.preset("medha-a100"), plan, config, instances)
    return deployment.simulation().run(arrive_at_rate(make_mix(mix, 60), rate=rate))


def _paper_system(name: str) -> Record:
    simulation = make_simulation(name, _SMALL, Topology.preset("medha-a100"), devices=16)
    return simulation.run(arrive_at_rate(make_mix("sharegpt4-5-long", 30), rate=0.5))


def _cluster(requests: int, rate: float, **sizes: object) -> Record:
    turns = make_conversations(requests, Lengths(3, 3), Lengths(10_000, 30_000), Lengths(300, 900), Lengths(20, 90))
    cluster = ClusterDeployment(_SMALL, Topology.preset("h100-rdma"), ParallelPlan(tensor=8), **sizes)  # type: ignore[arg-type]
    return cluster.simulation().run(arrive_at_rate(turns, rate=rate), keep_steps=True)


def _context_ranks() -> Record:
    deployment = Deployment(
        MODELS["llama-3-70b"],
        Topology.preset("h100-rdma"),
        ParallelPlan.meta(2, 8),
        EngineConfig.meta(page_size=64, max_running=8),
    )
    return deployment.simulation().run(synthesize(8, Lengths(20_000, 120_000), Lengths(5, 40)))


RUNS: dict[str, Callable[[], Record]] = {
    "default": lambda: _engine(EngineConfig(), ParallelPlan(tensor=8), "sharegpt4", 4.0),
    "medha": lambda: _engine(EngineConfig.medha(), ParallelPlan.medha(stage=2, tensor=8), "sharegpt4-5-long", 1.0),
    "sarathi-two-engines": lambda: _engine(EngineConfig.sarathi(512), ParallelPlan(tensor=8), "sharegpt4", 8.0, 2),
    "meta": _context_ranks,
    "vllm": lambda: _paper_system("vllm"),
    "loongserve": lambda: _paper_system("loongserve"),
    "cluster": lambda: _cluster(30, 3.0, prefill=2, decode=1),
    "cluster-servers": lambda: _cluster(30, 3.0, prefill=1, decode=2, settings=_SERVERS),
    "cluster-overload": lambda: _cluster(
        60, 12.0, prefill=1, decode=1, config=ConductorConfig(ttft=3.0, admission="predicted_early_rejection")
    ),
    "cluster-failures": lambda: _cluster(
        30,
        4.0,
        prefill=1,
        decode=2,
        coupled=1,
        roles_change=True,
        changes=(Change(2.0, "decode-0", "kill"), Change(6.0, "decode-0", "join"), Change(7.0, "prefill-0", "drain")),
    ),
}


def digest(record: Record) -> str:
    """Return a SHA-256 of what each request and each instance of a run came to."""
    lines = []
    for each in record.served:
        times = [each.due, each.ttft, each.tpot or 0.0, each.metrics.finished or 0.0]
        counts = (each.metrics.prompt_tokens, each.metrics.cached_tokens, each.metrics.output_tokens)
        lines.append(f"{each.number} {each.instance} {counts} {' '.join(f'{time:.9g}' for time in times)}")
    for instance in record.instances:
        totals = instance.totals
        lines.append(f"{instance.name} {totals.steps} {totals.rows} {totals.pairs} {totals.keys} {totals.busy:.9g}")
    lines += [f"rejected {each.number} {each.at:.9g} {each.stage}" for each in getattr(record, "rejected", ())]
    lines += [f"moved {each.number} {each.kind} {each.ended:.9g}" for each in getattr(record, "moved", ())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def main() -> None:
    """Print the digest of each run; with `--write`, store them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    found = {name: digest(run()) for name, run in RUNS.items()}
    if parser.parse_args().write:
        STORED.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
