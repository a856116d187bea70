"""The simulator makes the batches that an engine makes of the same requests, at the same times.

The engine has real tokens, keys of their pages and a fake device, whose pages hold these tokens; the simulated one has
lengths and ids of blocks alone.
"""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.fake_device import LENGTH, MODEL, VOCAB, FakeExecutor

from longctx.serving import Engine, EngineConfig, ParallelPlan, Slo
from longctx.serving.executor.executor import Pending, Results
from longctx.serving.predictor import RuntimePredictor
from longctx.serving.request.output import Metrics
from longctx.serving.scheduler.batch import Batch
from longctx.simulation import Instance, Record, Served, Simulation, VirtualExecutor, replay
from longctx.simulation.workloads import WorkloadRequest

PREDICTOR = RuntimePredictor.of_rows({16: 1e-3, 32: 2e-3}, (1, 16), (1e-5, 4e-5), 1e-4)
PLANS = [
    ParallelPlan(),
    ParallelPlan(3),
    ParallelPlan(1, 2, exchange="kvp", rank_tokens=24),
    ParallelPlan(2, 2, exchange="kvp", rank_tokens=24),
    ParallelPlan(1, 2, exchange="pass_kv", placement="interleave"),
]


def seconds(batch: Batch) -> float:
    """Not what is predicted, so that predictions are corrected alike."""
    return PREDICTOR.seconds(batch.work) * (1.3 if batch.work.chunks else 0.8)


class TimedExecutor(FakeExecutor):
    """Fake devices that take what virtual ones do."""

    def __init__(self, config: EngineConfig, plan: ParallelPlan, num_pages: int) -> None:
        super().__init__(config, plan, num_pages)
        self.virtual = VirtualExecutor(seconds, VOCAB, plan.stage)
        self._timed: dict[int, Any] = {}

    def clock(self) -> float:
        return self.virtual.now

    def submit(self, batch: Batch) -> Pending:
        pending = super().submit(batch)
        self._timed[id(pending)] = self.virtual.submit(batch), pending
        return pending

    def wait(self, pending: Pending) -> Results:
        self.virtual.wait(self._timed.pop(id(pending))[0])
        return super().wait(pending)


def make_requests(seed: int, number: int = 30) -> list[WorkloadRequest]:
    """Prompts that share documents and have ends of their own, which come in bursts."""
    rng = np.random.default_rng(seed)
    documents, at, requests = [(0, 1, 2), (0, 3), (4,), ()], 0.0, []
    for i in range(number):
        at += float(rng.choice([0.0, rng.exponential(8e-3)]))
        blocks = documents[rng.integers(4)]
        prompt = 10 * len(blocks) + int(rng.integers(1, 20)) + (80 if rng.random() < 0.1 else 0)
        requests.append(WorkloadRequest(at, prompt, int(rng.integers(1, 16)), blocks, 10, i))
    return requests


def run_engine(config: EngineConfig, plan: ParallelPlan, requests: list[WorkloadRequest]) -> Record:
    """An engine on fake devices; they check that every row sees the tokens that it should."""
    executor, record = TimedExecutor(config, plan, config.num_pages or 0), Record()
    engine = Engine(
        MODEL,
        None,
        config,
        executor=executor,
        clock=executor.clock,
        predictor=PREDICTOR,
        plan=plan,
        monitor=record.steps.append,
    )

    def sleep(time: float) -> None:
        executor.virtual.now += time

    return replay(engine, requests, executor.clock, sleep, record=record)


def compared(served: Served) -> tuple[object, ...]:
    """All that is known of a request but its tokens."""
    metrics = {name: getattr(served.metrics, name) for name in Metrics.__dataclass_fields__}
    return served.number, served.due, served.ttft, served.tpot, sorted(metrics.items())


@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**20),
    plan=st.sampled_from(PLANS),
    policy=st.sampled_from(["fcfs", "edf", "srpf", "lrs", "lrs_relative", "ilrs"]),
    chunking=st.sampled_from(["static", "adaptive", "static:12"]),
    admission=st.sampled_from(["reserve", "optimistic"]),
    run_ahead=st.integers(1, 3),
    prefix_cache=st.booleans(),
)
def test_the_same_requests_give_the_same_batches(
    seed: int, plan: ParallelPlan, policy: str, chunking: str, admission: Any, run_ahead: int, prefix_cache: bool
) -> None:
    config = EngineConfig(
        page_size=4,
        num_pages=36,
        max_running=5,
        token_budget=32,
        buckets=(16, 32),
        max_length=LENGTH,
        policy=policy,
        chunking=chunking,
        admission=admission,
        run_ahead=run_ahead,
        prefix_cache=prefix_cache,
        slo=Slo(ttft_least=0.01, tpot=0.01),
    )
    requests = make_requests(seed)
    real = run_engine(config, plan, requests)
    simulated = Simulation([Instance(MODEL.config, config, PREDICTOR, plan, seconds=seconds)]).run(requests)
    assert len(real.steps) > 20
    assert [compared(x) for x in real.served] == [compared(x) for x in simulated.served]
    assert real.steps == simulated.steps
    assert real.stats == simulated.stats
