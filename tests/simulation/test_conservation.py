"""What is conserved: simulated work is that of the batches, no token is computed twice, no device computes too much."""

import itertools
from typing import Any

import numpy as np
import pytest

from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.serving.predictor.roofline import roofline
from longctx.serving.scheduler.batch import Batch
from longctx.simulation import Instance, Record, Simulation
from longctx.simulation.utilization import mbu, mfu
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=200_000)
TOPOLOGY = Topology.preset("h100-rdma")


class Batches:
    """Hears of all batches, as they are planned."""

    def __init__(self) -> None:
        self.chunks: list[tuple[str, int, int, bool]] = []  # sequence, start, tokens, whether one is sampled
        self.finished = self.tokens = 0

    def note_plan(self, batch: Batch) -> None:
        self.chunks += [(chunk.sequence.name, *chunk[2:5]) for chunk in batch.chunks]

    def note_draw(self, batch: Batch, tokens: Any) -> None:
        self.finished += 1
        self.tokens += len(tokens)


def requests(seed: int, count: int = 40) -> list[WorkloadRequest]:
    rng = np.random.default_rng(seed)
    found, now = list[WorkloadRequest](), 0.0
    for number in range(count):
        now += rng.exponential(0.02)
        prompt = int(rng.integers(10_000, 60_000)) if number % 10 == 3 else int(rng.integers(1, 3000))
        found.append(WorkloadRequest(now, prompt, int(rng.integers(1, 200)), number=number))
    return found


def serve(plan: ParallelPlan, workload: list[WorkloadRequest], **options: Any) -> tuple[Record, Batches, Instance]:
    predictor = roofline(MODEL, TOPOLOGY, 1024, stage=plan.stage, context=plan.context, tensor=plan.tensor)
    defaults: dict[str, Any] = {"page_size": 64, "num_pages": 6000, "token_budget": 1024, "max_running": 16}
    config = EngineConfig(**(defaults | {"prefix_cache": False} | options))
    batches = Batches()
    instance = Instance(MODEL, config, predictor, plan, logs=[batches], topology=TOPOLOGY)
    return Simulation([instance]).run(workload), batches, instance


PLANS = [
    ParallelPlan(),
    ParallelPlan(stage=4, tensor=2),
    ParallelPlan(context=2, exchange="kvp", rank_tokens=20_000),
    ParallelPlan(stage=2, context=2, exchange="pass_kv", placement="interleave"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_simulated_work_is_that_of_the_batches(plan: ParallelPlan) -> None:
    """Every token of every request is computed once, in order, and attends to all before it."""
    workload = requests(1)
    record, batches, instance = serve(plan, workload)
    totals = record.totals
    assert len(record.served) == len(workload)
    rows = dict[str, list[tuple[int, int]]]()
    for name, start, count, _ in batches.chunks:
        rows.setdefault(name, []).append((start, count))
    computed = 0
    for number, request in enumerate(workload):
        chunks = rows[f"request-{number}/0"]
        ends = [0, *itertools.accumulate(count for _, count in chunks)]
        assert [start for start, _ in chunks] == ends[:-1]
        assert ends[-1] == request.prompt_tokens + request.output_tokens - 1
        computed += ends[-1]
    assert totals.rows == computed == sum(count for *_, count, _ in batches.chunks)
    assert totals.samples == batches.tokens == sum(request.output_tokens for request in workload)
    assert totals.steps == batches.finished
    assert totals.pairs == sum(
        (request.length - 1) * request.length // 2 for request in workload
    )  # each of n tokens attends to itself and those before it
    assert totals.keys == sum(start + count for _, start, count, _ in batches.chunks)
    assert totals.decode_pairs == sum(start + 1 for _, start, count, _ in batches.chunks if count == 1)
    assert instance.core.pool.num_held == 0
    assert record.stats is not None
    assert record.stats.output_tokens == totals.samples
    assert record.stats.prompt_tokens == sum(request.prompt_tokens for request in workload)
    assert [step.finished for step in record.steps] == sorted(step.finished for step in record.steps)
    assert sum(step.prompt_tokens + step.decodes for step in record.steps) == totals.rows


@pytest.mark.parametrize("plan", PLANS[1:3], ids=str)
def test_no_device_computes_or_reads_more_than_it_can(plan: ParallelPlan) -> None:
    record, _, _ = serve(plan, requests(2))
    totals = record.totals
    assert 0 < totals.busy <= record.seconds
    assert totals.stage_seconds <= plan.stage * totals.busy * (1 + 1e-9)
    devices = plan.num_devices
    assert 0 < mfu(MODEL, totals, TOPOLOGY.device, devices, totals.busy) < 1
    assert 0 < mbu(MODEL, totals, TOPOLOGY.device, plan, totals.busy) < 1


@pytest.mark.parametrize("seed", range(2))
def test_what_is_computed_twice_was_preempted(seed: int) -> None:
    options = {"admission": "optimistic", "page_size": 16, "num_pages": 300, "chunking": "adaptive"}
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(1, 500, 40).tolist(), rng.integers(1, 400, 40).tolist(), strict=True)
    workload = [WorkloadRequest(0.01 * i, prompt, output, number=i) for i, (prompt, output) in enumerate(lengths)]
    record, batches, _ = serve(ParallelPlan(stage=1 + seed), workload, slo=Slo(tpot=0.05), **options)
    assert record.stats is not None
    assert record.stats.preemptions > 0
    again = sum(each.metrics.recomputed_tokens for each in record.served)
    needed = sum(request.length - 1 for request in workload)
    # A batch in flight may have computed a row more for a sequence that was preempted meanwhile.
    planned = sum(count for *_, count, _ in batches.chunks)
    assert planned == needed + again
    assert record.totals.rows == planned
    assert record.totals.samples >= sum(request.output_tokens for request in workload)


def test_a_prefix_that_is_found_is_not_computed() -> None:
    workload = [WorkloadRequest(3.0 * i, 2048, 1, tuple(range(4)), 512, number=i) for i in range(4)]
    record, _, _ = serve(ParallelPlan(), workload, prefix_cache=True)
    assert record.totals.rows == 2048 + 3 * 64
    assert record.stats is not None
    assert record.stats.cached_tokens == 3 * (2048 - 64)
