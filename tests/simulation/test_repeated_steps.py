"""Repeated steps that only decode, as one event: the same record as one by one, to the last bit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.serving.engine.core import Core
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.predictor import RuntimePredictor
from longctx.serving.predictor.roofline import roofline
from longctx.serving.scheduler.sequence import completion_of
from longctx.simulation import EventLoop, Instance, Record, Simulation
from longctx.simulation.instance.repeated_decodes import advance, count_repeats
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=200_000)
SLIDING = dataclasses.replace(MODEL, sliding_window=900, sliding_layers=(*(True,) * 3, False) * 8)


def random_requests(rng: np.random.Generator, count: int, rate: float) -> list[WorkloadRequest]:
    """Some share prefixes, some follow others; bursts, and long outputs."""
    requests, now = list[WorkloadRequest](), 0.0
    for number in range(count):
        now += rng.exponential(1 / rate) * (rng.random() < 0.8)
        prompt, family = int(rng.exponential(800)) + 1, int(rng.integers(4))
        blocks = tuple(family * 1000 + i for i in range(int(rng.integers(prompt // 64 + 1))))
        after = int(rng.integers(number)) if number > 4 and rng.random() < 0.2 else None
        delay = float(rng.exponential(1.0)) if after is not None else 0.0
        output = int(rng.exponential(200)) + 1
        requests.append(WorkloadRequest(now, prompt, output, blocks, 64, number, after=after, delay=delay))
    return requests


def serve(
    requests: list[WorkloadRequest],
    plan: ParallelPlan,
    skips: bool,
    until: float,
    predictor: Any,
    model: LlamaConfig = MODEL,
    **options: Any,
) -> tuple[Record, Simulation]:
    config = EngineConfig(token_budget=512, **options)
    instances = [
        Instance(model, config, predictor, plan, name=name, skips_decodes=skips) for name in ("first", "second")
    ]
    simulation = Simulation(instances[: 1 + (len(requests) % 2)])
    return simulation.run(requests, until=until), simulation


def roofs(plan: ParallelPlan, model: LlamaConfig = MODEL) -> Any:
    return roofline(model, Topology.preset("a100-nvlink"), 512, stage=plan.stage, tensor=plan.tensor, overhead=1e-3)


def programs(plan: ParallelPlan) -> Any:
    """With steps in rows, as a compiled engine has them."""
    rows = (1, 2, 4, 16, 128, 512)
    return RuntimePredictor.of_rows({n: 1e-3 + 1e-5 * n for n in rows}, (1, 16), (1e-9, 2e-9), 1e-6)


def slow(plan: ParallelPlan) -> Any:
    """Steps get longer than those that are planned ahead, in the midst of runs of decodes."""
    rows = (1, 2, 512)
    return RuntimePredictor.of_rows(dict.fromkeys(rows, 0.045), (1,), (5e-6,))


def sliding_roofs(plan: ParallelPlan) -> Any:
    return roofs(plan, SLIDING)


def sliding_programs(plan: ParallelPlan) -> Any:
    return dataclasses.replace(programs(plan), window=900, sliding_share=0.75)


@pytest.mark.parametrize("seed", range(12))
def test_one_event_is_the_same_as_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = ParallelPlan(stage=int(rng.choice([1, 1, 2, 3, 4])), tensor=2)
    make: Callable[[ParallelPlan], Any] = (roofs, programs, slow)[seed % 3]
    model = MODEL
    if seed >= 8:
        model, make = SLIDING, (sliding_roofs, sliding_programs)[seed % 2]
    requests = random_requests(rng, 30, float(rng.choice([0.2, 1.0, 6.0])))
    options = {
        "page_size": int(rng.choice([16, 64, 256])),
        "num_pages": int(rng.choice([2000, 20_000])),
        "max_running": int(rng.choice([2, 6, 24])),
        "run_ahead": int(rng.choice([1, 2, 3])),
        "prefix_cache": bool(rng.random() < 0.5),
        "admission": str(rng.choice(["reserve", "optimistic"])),
        "chunking": str(rng.choice(["static", "adaptive"])),
        "policy": str(rng.choice(["fcfs", "ilrs", "edf"])),
        "slo": Slo(tpot=float(rng.choice([0.05, 0.2]))),
        "hash_key": b"0" * 16,
    }
    until = float(rng.choice([np.inf, 20.0]))
    (one, simulation), (other, by_one) = (
        serve(requests, plan, skips, until, make(plan), model, **options) for skips in (True, False)
    )
    assert one.served == other.served
    assert one.open == other.open
    assert one.steps == other.steps
    assert one.timeline == other.timeline
    assert one.stats == other.stats
    assert one.totals == other.totals
    assert one.seconds == other.seconds
    for instance, same in zip(simulation.instances, by_one.instances, strict=True):
        assert isinstance(instance, Instance)
        assert isinstance(same, Instance)
        assert factors_of(instance.core) == factors_of(same.core)
    assert simulation.loop.num_events <= by_one.loop.num_events


def test_a_long_output_takes_few_events() -> None:
    plan = ParallelPlan()
    options = {"page_size": 256, "num_pages": 2000, "prefix_cache": False, "max_running": 4}
    requests = [WorkloadRequest(0.0, 100, 10_000)]
    record, simulation = serve([*requests, *requests], plan, True, np.inf, roofs(plan), **options)
    assert record.totals.steps == 10_000
    assert simulation.loop.num_events < 1_000


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(context=2)], ids=str)
def test_totals_have_what_windows_leave(plan: ParallelPlan) -> None:
    requests = [WorkloadRequest(0.0, prompt, 700, number=number) for number, prompt in enumerate((10, 800, 2000))]
    options = {"page_size": 64, "num_pages": 2000, "prefix_cache": False, "max_running": 4}
    predictor = roofline(SLIDING, Topology.preset("h100-rdma"), 512, context=plan.context)
    record, _ = serve([*requests], plan, True, np.inf, predictor, SLIDING, **options)
    assert record.totals.window_pairs == sum(
        min(position + 1, 900) for each in requests for position in range(each.prompt_tokens + each.output_tokens - 1)
    )
    assert record.totals.window_decode_pairs < record.totals.decode_pairs
    assert record.totals.window_keys < record.totals.keys


def factors_of(core: Core) -> tuple[float, float]:
    """Return by what the scheduler corrects predictions."""
    predictor = core.scheduler.chunker.predictor
    return predictor.prompt_factor, predictor.decode_factor


def core_at(time: float, plan: ParallelPlan, requests: list[WorkloadRequest]) -> tuple[Core, list[StepMetrics]]:
    """A core that has run its steps one by one until a time, and the steps that have ended."""
    config = EngineConfig(token_budget=512, page_size=256, num_pages=2000, run_ahead=1, hash_key=b"0" * 16)
    instance, loop = Instance(MODEL, config, roofs(plan), plan, skips_decodes=False), EventLoop()
    instance.attach(loop, lambda request, metrics: None)
    for request in requests:
        instance.add(request, 0.0)
    loop.run(until=time)
    return instance.core, instance.steps


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_core_that_is_advanced_is_as_after_as_many_steps(stages: int) -> None:
    plan, requests = ParallelPlan(stage=stages), [WorkloadRequest(0.0, 800 + i, 400, number=i) for i in range(4)]
    _, steps = core_at(np.inf, plan, requests)
    core, ended = core_at(steps[100].finished, plan, requests)
    times, batches = 30, core.in_flight.in_stages
    assert count_repeats(core) > times
    busy = sum(bool(batch.chunks) for batch in batches)
    new = steps[len(ended) : len(ended) + times * busy]
    ends = {
        batch.index: np.array([step.finished for step in new if (step.number - batch.index) % stages == 0])
        for batch in batches
        if batch.chunks
    }
    seconds = {step.number: step.rank_seconds[0] for step in steps}
    predicted, now = [step.predicted for step in new], new[-1].finished
    advance(core, times, ends, lambda number: seconds.get(number, 0.0), predicted, now)

    other, _ = core_at(now, plan, requests)
    assert core.stats() == other.stats()
    assert factors_of(core) == factors_of(other)
    for mine, same in zip(core.scheduler.running, other.scheduler.running, strict=True):
        counts = [(each.computed, each.length, each.ready, each.pages) for each in (mine, same)]
        assert counts[0] == counts[1]
        assert completion_of(mine).metrics == completion_of(same).metrics
        assert completion_of(mine).num_known == completion_of(same).num_known
    for batch, twin in zip(core.in_flight.in_stages, other.in_flight.in_stages, strict=True):
        assert (batch.index, batch.work, batch.predicted) == (twin.index, twin.work, twin.predicted)
        assert [chunk.start for chunk in batch.chunks] == [chunk.start for chunk in twin.chunks]


@pytest.mark.parametrize("stages", [1, 3])
def test_looking_at_a_core_in_the_midst_of_a_run_changes_nothing(stages: int) -> None:
    plan, looks = ParallelPlan(stage=stages), list[int]()
    config = EngineConfig(token_budget=512, page_size=64, num_pages=2000, prefix_cache=False)
    requests = random_requests(np.random.default_rng(7), 20, 1.0)

    def run(step: float) -> Record:
        instance = Instance(MODEL, config, roofs(plan), plan)
        simulation = Simulation([instance])
        for at in np.arange(0.0, 15.0, step).tolist():
            simulation.loop.at(at, lambda: looks.append(instance.core.scheduler.num_steps))
        return simulation.run(requests)

    often = run(0.003)
    assert looks == sorted(looks)
    assert len(set(looks)) > 100
    assert often == run(20.0)
