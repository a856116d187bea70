"""Looking ahead: the predicted first token comes when predicted, and nothing is changed by looking."""

import numpy as np
import pytest
from bare_scheduler import BareScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, Event, ParallelPlan, Request, SamplingParams
from longctx.serving.predictor import CurvePredictor, Work
from longctx.serving.scheduler.look_ahead import TtftEstimate, copy_scheduler, look_ahead
from longctx.serving.scheduler.policy import POLICIES
from longctx.serving.scheduler.sequence import Sequence
from longctx.simulation import VirtualExecutor

MODEL = Llama(LlamaConfig(50, 8, 8, 6, 1, 1, 8, max_positions=4096))
# 10 ms whatever there is, 5,000 tokens a second besides, and 100 million pairs.
DEVICE = CurvePredictor((1, 2), (0.0102, 0.0104), 1e-8, 1e-7, 1e-5)


def make_engine(stage: int = 1, context: int = 1, **options: object) -> Engine:
    """On several ranks, sequences grow from 64 tokens on."""
    executor = VirtualExecutor(lambda batch: DEVICE.seconds(batch.work), 50, stage)
    options = {"token_budget": 64, "page_size": 16, "num_pages": 64, "max_running": 4, "run_ahead": 1} | options
    plan = ParallelPlan(stage=stage, context=context, exchange="kvp", rank_tokens=64)
    config = EngineConfig(hash_key=bytes(16), **options)  # type: ignore[arg-type]
    return Engine(MODEL, None, config, executor=executor, clock=executor.clock, predictor=DEVICE, plan=plan)


def submit(engine: Engine, rng: np.random.Generator, request_id: str | None = None) -> Request:
    """A random request with a prompt that others may begin with too."""
    document = np.random.default_rng(int(rng.integers(3))).integers(0, 50, int(rng.integers(1, 200))).tolist()
    request = Request(
        document + rng.integers(0, 50, int(rng.integers(0, 20))).tolist() or [1],
        SamplingParams(max_tokens=int(rng.integers(1, 40)), ignore_eos=True),
        request_id=request_id,
        priority=int(rng.choice([0, 0, 0, 1])),
        tenant=str(rng.integers(2)),
    )
    engine.submit(request)
    return request


def as_sequence(engine: Engine, request: Request) -> Sequence:
    prepared = engine.prepare(request)
    return Sequence(
        "new",
        2**62,
        len(prepared.tokens),
        request.sampling.max_tokens,
        arrival=engine.now(),
        priority=request.priority,
        tenant=request.tenant,
        keys=list(prepared.keys),
    )


def estimate_of(engine: Engine, request: Request, horizon: float) -> TtftEstimate:
    now, twin = engine.now(), copy_scheduler(engine.scheduler)
    return look_ahead(twin, [as_sequence(engine, request)], now, now, horizon, to_its_end)


def to_its_end(sequence: Sequence) -> int:
    return sequence.prompt_length + sequence.max_tokens


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    policy=st.sampled_from(sorted(POLICIES)),
    admission=st.sampled_from(["reserve", "optimistic"]),
    chunking=st.sampled_from(["static", "adaptive"]),
    before=st.integers(0, 12),
    steps=st.integers(0, 30),
)
def test_the_first_token_comes_when_predicted(
    seed: int, policy: str, admission: str, chunking: str, before: int, steps: int
) -> None:
    """Where steps take what the predictor says and every completion is as long as its max_tokens."""
    engine, rng = make_engine(policy=policy, admission=admission, chunking=chunking), np.random.default_rng(seed)
    for _ in range(before):
        submit(engine, rng)
        if rng.random() < 0.5:
            engine.step()
    for _ in range(steps):
        engine.step()
    twin, now = copy_scheduler(engine.scheduler), engine.now()
    request = submit(engine, rng, "new")
    estimate = look_ahead(twin, [as_sequence(engine, request)], now, now, 1e9, to_its_end)
    (output,) = [event.output for event in run(engine) if event.request_id == "new" and event.output]
    if estimate.first_token is None:  # further away than it looks
        assert output.metrics.ttft > estimate.looked - 1e-9
    else:
        assert output.metrics.ttft == pytest.approx(estimate.first_token, rel=1e-6)


def run(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    stage=st.sampled_from([1, 2, 3]),
    run_ahead=st.integers(1, 4),
    before=st.integers(0, 12),
    steps=st.integers(0, 30),
)
def test_steps_in_flight_make_little_difference(seed: int, stage: int, run_ahead: int, before: int, steps: int) -> None:
    engine, rng = make_engine(stage, run_ahead=run_ahead), np.random.default_rng(seed)
    for _ in range(before):
        submit(engine, rng)
    for _ in range(steps):
        engine.step()
    twin, now = copy_scheduler(engine.scheduler), engine.now()
    request = submit(engine, rng, "new")
    estimate = look_ahead(twin, [as_sequence(engine, request)], now, now, 1e9, to_its_end)
    (output,) = [event.output for event in run(engine) if event.request_id == "new" and event.output]
    longest = DEVICE.seconds(Work().with_chunk(400, 64, True))
    in_flight = (run_ahead + 2 * stage) * longest
    if estimate.first_token is None:
        assert output.metrics.ttft > estimate.looked - in_flight
    else:
        assert output.metrics.ttft == pytest.approx(estimate.first_token, abs=in_flight, rel=0.1)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    stage=st.sampled_from([1, 2, 3]),
    context=st.sampled_from([1, 2, 3]),
    admission=st.sampled_from(["reserve", "optimistic"]),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_looking_ahead_changes_nothing(seed: int, stage: int, context: int, admission: str, policy: str) -> None:
    def serve(looks: bool) -> list[Event]:
        engine = make_engine(stage, context, admission=admission, policy=policy, run_ahead=2, num_pages=64 // context)
        rng = np.random.default_rng(seed)
        events = []
        for _ in range(12):
            request = submit(engine, rng)
            if looks:
                twin = copy_scheduler(engine.scheduler)
                assert (
                    look_ahead(twin, [as_sequence(engine, request)], engine.now(), engine.now(), 1e9, to_its_end).looked
                    > 0
                )
            for _ in range(3):
                events += engine.step()
        return events + run(engine)

    assert serve(looks=True) == serve(looks=False)


def test_looking_ahead_grows_nobody() -> None:
    """A prompt that grows onto other ranks in a look ahead has not grown where it is served."""
    run = BareScheduler(ParallelPlan(context=3, exchange="kvp", rank_tokens=40), 20, page_size=4)
    long = run.add(110, 4)
    run.step()
    run.step()
    placed = str(long.placement)
    twin, newcomer = copy_scheduler(run.scheduler), Sequence("new", 99, 8, 2, run.now)
    look_ahead(twin, [newcomer], run.now, run.now, 10.0, to_its_end)
    assert str(long.placement) == placed
    run.run()
    assert any(len(chunk.ranks) == 3 for batch in run.batches for chunk in batch.chunks)
    run.check_empty()


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"max_running": 1}, "slots"),
        ({"num_pages": 8}, "pages"),
        ({}, "prefill"),
        ({"policy": "fcfs", "max_running": 2}, "queue"),
    ],
)
def test_what_a_request_waits_for(options: dict[str, object], bound: str) -> None:
    engine = make_engine(**options)
    if options:
        long = bound == "queue"
        prompt = np.random.default_rng(0).integers(0, 50, 900 if long else 90).tolist()
        engine.submit(Request(prompt, SamplingParams(max_tokens=38, ignore_eos=True)))
        engine.step()
    request = Request([1] * 50, SamplingParams(max_tokens=8))
    estimate = estimate_of(engine, request, 1e9)
    assert estimate.bound == bound
    assert "by prediction" in str(estimate)


def test_the_horizon_ends_the_look() -> None:
    engine = make_engine(max_running=1)
    engine.submit(Request([1] * 50, SamplingParams(max_tokens=200, ignore_eos=True)))
    engine.step()
    request = Request([1] * 50, SamplingParams(max_tokens=8))
    estimate = estimate_of(engine, request, 0.5)
    assert estimate.first_token is None
    assert 0.5 < estimate.looked < 0.6
    assert estimate.is_after(0.5)
    assert not estimate.is_after(1.0)
    assert "not before 0.5" in str(estimate)
