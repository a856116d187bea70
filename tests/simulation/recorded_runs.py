"""Simulated runs in twenty configurations, as digests: `python -m tests.simulation.recorded_runs --write`.

A change of structure or of speed must not change what is simulated. A digest covers every step (its rows, and its times
to the last bit), when each request came, its first token, its last one and its instance, what each instance computed,
and which pages its pool has, holds and finds in the end. Arrivals are multiples of 2^-10 s, so that no machine rounds
them otherwise.
"""

import argparse
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from longctx.cluster.conductor.config import ConductorConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.simulation import Instance, Simulation
from longctx.simulation.cluster import Change, ClusterSettings
from longctx.simulation.deployment import ClusterDeployment, Deployment
from longctx.simulation.models import MODELS
from longctx.simulation.record import Record
from longctx.simulation.workloads import (
    Lengths,
    WorkloadRequest,
    arrive_at_rate,
    closed_loop,
    make_conversations,
    make_mix,
    synthesize,
)
from papers.baselines import make_simulation

STORED = Path(__file__).with_suffix(".json")
_SMALL = MODELS["llama-3-8b"]
_SERVERS = ClusterSettings(first_token="decode", overlap="chunk", report_seconds=0.5, event_seconds=0.05)
_SIXTEEN = ParallelPlan(stage=2, tensor=8)


class Run(NamedTuple):
    """A simulation and what it serves."""

    simulation: Simulation
    requests: list[WorkloadRequest]

    def record(self) -> Record:
        """Serve the requests; their arrivals are rounded."""
        rounded = [dataclasses.replace(each, arrival=round(each.arrival * 1024) / 1024) for each in self.requests]
        return self.simulation.run(rounded, keep_steps=True)


def _engine(config: EngineConfig, plan: ParallelPlan, requests: list[WorkloadRequest], instances: int = 1) -> Run:
    deployment = Deployment(_SMALL, Topology.preset("medha-a100"), plan, config, instances)
    return Run(deployment.simulation(), requests)


def _mix(name: str, rate: float, count: int = 60) -> list[WorkloadRequest]:
    return arrive_at_rate(make_mix(name, count), rate=rate)


def _long_among_short(count: int, rate: float, longest: int = 120_000, output: int = 400) -> list[WorkloadRequest]:
    """Every eighth prompt is long, so that most steps have a part of one beside decodes and other prompts."""
    short = synthesize(count, Lengths(20, 6_000), Lengths(1, output), seed=1)
    long = synthesize(count, Lengths(longest // 4, longest), Lengths(1, output), seed=2)
    return arrive_at_rate([b if a.number % 8 == 3 else a for a, b in zip(short, long, strict=True)], rate, seed=3)


def _paper_system(name: str) -> Run:
    simulation = make_simulation(name, _SMALL, Topology.preset("medha-a100"), devices=16)
    return Run(simulation, _mix("sharegpt4-5-long", 0.5, 30))


def _turns(sessions: int, prompt: int, output: int, rate: float) -> list[WorkloadRequest]:
    lengths = Lengths(prompt // 3, prompt), Lengths(300, 900), Lengths(20, output)
    return arrive_at_rate(make_conversations(sessions, Lengths(3, 3), *lengths, delay=0.25), rate)


def _cluster(requests: int, rate: float, **sizes: object) -> Run:
    turns = make_conversations(requests, Lengths(3, 3), Lengths(10_000, 30_000), Lengths(300, 900), Lengths(20, 90))
    cluster = ClusterDeployment(_SMALL, Topology.preset("h100-rdma"), ParallelPlan(tensor=8), **sizes)  # type: ignore[arg-type]
    return Run(cluster.simulation(), arrive_at_rate(turns, rate=rate))


def _context_ranks() -> Run:
    deployment = Deployment(
        MODELS["llama-3-70b"],
        Topology.preset("h100-rdma"),
        ParallelPlan.meta(2, 8),
        EngineConfig.meta(page_size=64, max_running=8),
    )
    return Run(deployment.simulation(), synthesize(8, Lengths(20_000, 120_000), Lengths(5, 40)))


def _slow_steps() -> Run:
    """Steps of 30 to 90 ms: some leave no time to plan the next one ahead."""
    config = EngineConfig(page_size=128, num_pages=4_000, token_budget=1_024, chunking="static", policy="fcfs")
    deployment = Deployment(MODELS["llama-3-70b"], Topology.preset("medha-a100"), ParallelPlan(tensor=8), config)
    return Run(deployment.simulation(), _long_among_short(24, 0.5))


def _tight(**options: Any) -> EngineConfig:
    """Adaptive chunks that share 25 ms of a step with decodes."""
    sizes = {"page_size": 256, "token_budget": 4_096, "max_running": 256, "prefix_cache": False, "run_ahead": 1}
    return EngineConfig(**sizes | {"slo": Slo(tpot=0.05)} | options)  # type: ignore[arg-type]


RUNS: dict[str, Callable[[], Run]] = {
    "default": lambda: _engine(EngineConfig(), ParallelPlan(tensor=8), _mix("sharegpt4", 4.0)),
    "medha": lambda: _engine(
        EngineConfig.medha(), ParallelPlan.medha(stage=2, tensor=8), _mix("sharegpt4-5-long", 1.0)
    ),
    "sarathi-two-engines": lambda: _engine(
        EngineConfig.sarathi(512), ParallelPlan(tensor=8), _mix("sharegpt4", 8.0), 2
    ),
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
    "first-try": lambda: _engine(EngineConfig(num_pages=3_000), _SIXTEEN, _long_among_short(120, 1.5)),
    "tight-adaptive": lambda: _engine(_tight(), _SIXTEEN, _long_among_short(120, 1.0)),
    "four-stages-edf": lambda: _engine(
        _tight(policy="edf", run_ahead=3, prefix_cache=True),
        ParallelPlan(stage=4, tensor=4),
        _long_among_short(120, 2.0),
    ),
    "preemption-srpf": lambda: _engine(
        EngineConfig(page_size=16, num_pages=2_600, admission="optimistic", policy="srpf", max_running=16),
        ParallelPlan(tensor=4),
        _long_among_short(64, 6.0, 40_000),
    ),
    "preemption-ilrs": lambda: _engine(
        EngineConfig(page_size=64, num_pages=860, admission="optimistic", max_running=24, run_ahead=1),
        ParallelPlan(stage=2, tensor=2),
        _long_among_short(64, 8.0, 50_000, 900),
    ),
    "backlog-lrs": lambda: _engine(
        EngineConfig(page_size=32, num_pages=8_000, policy="lrs_relative", max_running=12),
        ParallelPlan(stage=3, tensor=2),
        _long_among_short(48, float("inf"), 60_000),
    ),
    "conversations-three-engines": lambda: _engine(
        EngineConfig(page_size=512, num_pages=400, token_budget=2_048, chunking="static", policy="fcfs"),
        ParallelPlan(tensor=8),
        _turns(40, 60_000, 700, 3.0),
        3,
    ),
    "no-targets": lambda: _engine(
        EngineConfig(
            token_budget=2_048, page_size=128, policy="lrs", slo=Slo(tpot=None, step_seconds=0.03), max_share=0.25
        ),
        ParallelPlan(tensor=4),
        _long_among_short(40, 1.0, 200_000),
    ),
    "closed-loop": lambda: _engine(
        EngineConfig(page_size=64, chunking="static:256", max_running=32),
        _SIXTEEN,
        closed_loop(_long_among_short(64, 1.0, 30_000), 6),
    ),
    "slow-steps": _slow_steps,
}


def digest(run: Run) -> str:
    """Return a SHA-256 of what each step, each request and each instance of a run came to."""
    record, hashed = run.record(), hashlib.sha256()

    def add(*values: object) -> None:
        hashed.update(" ".join(v.hex() if isinstance(v, float) else repr(v) for v in values).encode() + b"\n")

    for each in record.served:
        metrics = each.metrics
        add(each.number, each.instance, each.due, each.ttft, each.tpot, metrics.finished, metrics.longest_gap)
        add(metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens, metrics.slack, metrics.passed_by)
    for instance in record.instances:
        totals = instance.totals
        add(instance.name, totals.steps, totals.rows, totals.pairs, totals.keys, totals.busy, totals.stage_seconds)
        for step in instance.steps:
            add(step.number, step.finished, step.seconds, step.predicted, step.chunks, step.rows, step.admitted)
            add(*step.rank_seconds, *step.first_tokens, *step.gaps)
    for each in getattr(record, "rejected", ()):
        add("rejected", each.number, each.at, each.stage)
    for each in getattr(record, "moved", ()):
        add("moved", each.number, each.kind, each.ended)
    for pool in _pools(run.simulation):
        add(pool.num_evicted, pool.reserved, [(key, pool.find(key)) for key in sorted(pool.keys)])
        # What would be overwritten next, page by page.
        add([pool.allocate(rank, False) for rank in range(pool.num_ranks) for _ in range(pool.available(rank))])
    return hashed.hexdigest()


def _pools(simulation: Simulation) -> list[PagePool]:
    """Return the pools of engines of ours, also of those behind a conductor."""
    engines = [each for each in simulation.instances if isinstance(each, Instance)]
    engines += [node.core for node in simulation.nodes.values() if node.core is not None]
    return [each.core.pool for each in engines]


def main() -> None:
    """Print the digest of each run; with `--write`, store them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("runs", nargs="*", choices=[*RUNS, []], help="of them alone")
    options, found = parser.parse_args(), json.loads(STORED.read_text())
    for name in options.runs or RUNS:
        begun = time.process_time()
        same, found[name] = found.get(name), digest(RUNS[name]())
        change = "" if same == found[name] else "  differs"
        print(f"{name:<28} {found[name][:12]}  {time.process_time() - begun:5.1f} s{change}", flush=True)
    if options.write:
        STORED.write_text(json.dumps({name: found[name] for name in RUNS if name in found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
