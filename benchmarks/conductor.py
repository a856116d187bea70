"""Decisions of the conductor a second, on one core: `python -m benchmarks.conductor`.

64 instances of LLaMA2-70B on 8 x A800 each by the roofline, half of them prefill and half decode, and a prefix index
of a million blocks. Requests are drawn: conversations that go on, 8,000 tokens on average, half of them seen before, at
a rate that the cluster can just bear. A decision is
`assign`, and all else that a served request asks of the conductor: `prefilled`, `finished`, and a report of each
instance every second. Each prompt's blocks are stored in the index, by KV events; these are not in the time.
"""

import argparse
import gc
import heapq
import itertools
import time
from collections.abc import Iterator

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import POLICIES, ConductorConfig, Role
from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.conductor.instance import InstanceSpec, Report
from longctx.cluster.conductor.overload import ADMISSION_RULES
from longctx.cluster.conductor.request import Assignment, ClusterRequest
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.roofline import roofline

LLAMA_70B = LlamaConfig(32000, 8192, 28672, 80, 64, 8, 128, max_positions=200_000)
CHUNK, DECODE_TOKENS, BANDWIDTH = 8192, 1_300_000, 100e9
INSTANCES, RATE = 64, 60.0  # the latter: requests a second of virtual time
BLOCK, HELD = 64, 1_000_000  # tokens of a block; blocks that the index holds beside


def make_cluster(policy: str, admission: str) -> tuple[Conductor, PrefixIndex]:
    """Half of the instances prefill; together those hold `HELD` blocks that no request of the benchmark has."""
    predictor, plan = roofline(LLAMA_70B, Topology.preset("a100-nvlink"), CHUNK, tensor=8), ParallelPlan(tensor=8)
    rng, index = np.random.default_rng(1), PrefixIndex()
    conductor = Conductor(ConductorConfig(policy, admission), index)  # type: ignore[arg-type]
    for i in range(INSTANCES):
        role: Role = "prefill" if i < INSTANCES // 2 else "decode"
        costs = PredictorCosts.of_model(predictor, LLAMA_70B, CHUNK, plan)  # each has its own, as they do when serving
        conductor.join(InstanceSpec(f"{role}-{i}", role, costs, BLOCK, DECODE_TOKENS, 256, BANDWIDTH), 0.0)
        if role == "prefill":
            index.store(f"{role}-{i}", "host", rng.integers(0, 2**64, HELD // (INSTANCES // 2), np.uint64))
    return conductor, index


def drawn_requests(count: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(prompt tokens, output tokens, keys) of conversations, each prompt of which has the one before as its prefix."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 2**64, 1024 // BLOCK, np.uint64)
    conversations: list[np.ndarray] = []
    for _ in range(count):
        if conversations and rng.random() < 0.6:
            at = int(rng.integers(max(0, len(conversations) - 500), len(conversations)))
        else:
            at = len(conversations)
            conversations.append(system)
        more = int(rng.exponential(4000)) // BLOCK + 1
        conversations[at] = np.concatenate([conversations[at], rng.integers(0, 2**64, more, np.uint64)])
        keys = conversations[at][: 128_000 // BLOCK]
        yield len(keys) * BLOCK + int(rng.integers(1, BLOCK)), int(rng.exponential(200)) + 1, keys


def measure(
    conductor: Conductor, index: PrefixIndex, requests: list[ClusterRequest], outputs: list[int]
) -> dict[str, float]:
    """Serve requests as predicted, and take the CPU time of what the conductor does."""
    events: list[tuple[float, int, str, str]] = []  # what will happen: (when, order, what, whose)
    order, spent, slowest, placed, hits = itertools.count(), 0.0, 0.0, 0, 0
    reports, clock = 0.0, time.process_time
    length = {each.request_id: n for each, n in zip(requests, outputs, strict=True)}
    gc.collect()
    gc.disable()
    for number, request in enumerate(requests):
        now = number / RATE
        begun = clock()
        while events and events[0][0] <= now:
            when, _, what, request_id = heapq.heappop(events)
            if what == "prefilled" and conductor.prefilled(request_id, when) is None:
                heapq.heappush(events, (when + 0.03 * length[request_id], next(order), "finished", request_id))
            elif what == "finished":
                conductor.finished(request_id, when)
        if now >= reports:
            for view in conductor.instances(now):
                known = frozenset(conductor.state.instances[view.name].open)
                conductor.report(view.name, Report(view.queue_seconds, view.decoding, view.decode_tokens, known), now)
            reports = now + 1.0
        decision = conductor.assign(request, now)
        taken = clock() - begun
        spent, slowest = spent + taken, max(slowest, taken)
        if isinstance(decision, Assignment):
            placed, hits = placed + 1, hits + decision.cached
            heapq.heappush(events, (now + decision.ttft, next(order), "prefilled", request.request_id))
            index.store(decision.prefill, "host", request.keys)
    gc.enable()
    tokens = sum(each.prompt_tokens for each in requests)
    return {
        "decisions/s": len(requests) / spent,
        "us/decision": 1e6 * spent / len(requests),
        "slowest ms": 1e3 * slowest,
        "placed": placed / len(requests),
        "hit rate": hits / tokens,
        "blocks/prompt": float(np.mean([len(each.keys) for each in requests])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    count = parser.parse_args().requests
    lengths = [*drawn_requests(count)]
    print(f"{INSTANCES} instances, {count:,} requests, {HELD:,} other blocks in the index\n")
    cases = [(each, "none") for each in POLICIES]
    cases += [(POLICIES[-1], each) for each in ADMISSION_RULES if each != "none"]
    for policy, admission in cases:
        conductor, index = make_cluster(policy, admission)
        requests = [ClusterRequest(str(i), tokens, 2048, keys) for i, (tokens, _, keys) in enumerate(lengths)]
        found = measure(conductor, index, requests, [output for _, output, _ in lengths])
        print(f"{policy:16} {admission:26}", *(f"{name} {value:.4g}" for name, value in found.items()), sep="  ")


if __name__ == "__main__":
    main()
