"""Defects that a review of engine, waits for prefixes and simulation found."""

import fake_device
import numpy as np
import pytest
from fake_device import MODEL, make_engine

from longctx.parallel.topology import Topology
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.predictor.roofline import roofline
from longctx.simulation import Instance, Simulation
from longctx.simulation.workloads import WorkloadRequest


def test_a_slowly_growing_prefix_is_not_waited_for_longer_than_computing_it() -> None:
    rng = np.random.default_rng(0)
    engine = make_engine(num_pages=800, page_size=1, token_budget=32, max_running=16, policy="fcfs")
    document = rng.integers(0, 50, 128).tolist()
    one = SamplingParams(max_tokens=1)
    engine.submit(Request([9] * 3, SamplingParams(max_tokens=200, ignore_eos=True), priority=2))
    engine.step()
    engine.submit(Request([*document, 1], one))
    engine.step()
    engine.submit(Request([*document, 2], one, request_id="urgent", priority=1))
    steps, ended = 0, False
    while not ended:
        engine.submit(Request(rng.integers(0, 50, 29).tolist(), one, priority=1))
        ended = any(event.output and event.request_id == "urgent" for event in engine.step())
        steps += 1
    assert steps <= 10  # 5 without waits, 46 with them


def test_a_prepared_request_submitted_twice_shares_nothing_without_a_prefix_cache() -> None:
    engine = make_engine(prefix_cache=False)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=3, seed=1)
    prepared = engine.prepare(Request(list(range(1, 20)), params))
    cached = []
    for _ in range(2):
        before = engine.stats().cached_tokens
        engine.submit(prepared)
        while engine.has_work:
            engine.step()
        cached.append(engine.stats().cached_tokens - before)
    assert cached[0] == cached[1]


def test_a_tokenizer_that_fails_ends_every_request_with_an_event() -> None:
    class Tokenizer:
        eos_ids = ()
        fails = False

        def decode(self, ids: list[int]) -> str:
            if self.fails:
                raise KeyError("no such token")
            return "x" * len(ids)

    tokenizer = Tokenizer()
    config = EngineConfig(page_size=4, num_pages=60, max_running=6, token_budget=16)
    executor = fake_device.FakeExecutor(config, ParallelPlan(), 60)
    engine = Engine(MODEL, None, config, executor=executor, clock=executor.clock, tokenizer=tokenizer)
    for i in range(3):
        engine.submit(Request([1 + i, 2], SamplingParams(max_tokens=30, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    tokenizer.fails = True
    with pytest.raises(KeyError):
        engine.step()
    assert [event.output.finish_reason for event in engine.step() if event.output] == ["error"] * 3


def test_a_refused_workload_leaves_the_simulation_usable() -> None:
    config = EngineConfig(page_size=4, num_pages=24, max_running=6, token_budget=16)
    simulation = Simulation([Instance(MODEL.config, config, roofline(MODEL.config, Topology.preset("cpu"), 16))])
    with pytest.raises(ValueError, match="more than"):
        simulation.run([WorkloadRequest(0.0, 8, 40), WorkloadRequest(1e-5, 500, 4)])
    assert len(simulation.run([WorkloadRequest(0.0, 8, 60)]).served) == 1
