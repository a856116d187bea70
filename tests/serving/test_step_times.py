"""How long steps take where the host and the device take known times, and what corrections learn from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, Request, SamplingParams, StepMetrics
from longctx.serving.executor.interface import Results
from longctx.serving.predictor import CurvePredictor, Work
from longctx.serving.predictor.correction import Corrected
from longctx.serving.profiler import BatchShape, measure
from longctx.serving.scheduler.batch import Batch
from longctx.simulation import Record, VirtualExecutor
from longctx.simulation.reports.report import summarize, table

MODEL = Llama(LlamaConfig(50, 8, 8, 4, 1, 1, 8, max_positions=10_000))
MS = 1e-3
READ = 0.02 * MS
# 2 ms for up to 16 rows, and 0.1 ms for each further one.
CURVE = CurvePredictor((16, 32), (2 * MS, 3.6 * MS), 0.0, 0.0, 0.0)


class HostAndDevice(VirtualExecutor):
    """The host takes `host` seconds to submit a batch, which begins on the device in the midst of that."""

    def __init__(self, host: float, decode: float, prompt: float) -> None:
        super().__init__(lambda batch: prompt if any(not x.decodes for x in batch.chunks) else decode, 50)
        self.host = host

    def submit(self, batch: Batch):  # type: ignore[no-untyped-def]
        self.now += self.host / 2
        pending = super().submit(batch)
        self.now += self.host / 2
        return pending

    def wait(self, pending) -> Results:  # type: ignore[no-untyped-def]
        results = super().wait(pending)
        self.now += READ
        return results


def serve(
    executor: HostAndDevice, predictor: CurvePredictor = CURVE, requests: int = 12, tokens: int = 40, **options: object
) -> tuple[list[StepMetrics], Engine]:
    steps: list[StepMetrics] = []
    options = {"token_budget": 32, "max_running": 4, "page_size": 4, "num_pages": 512, "prefix_cache": False} | options
    config = EngineConfig(**options)  # type: ignore[arg-type]
    engine = Engine(
        MODEL, None, config, executor=executor, clock=executor.clock, predictor=predictor, monitor=steps.append
    )
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.generate([Request([i + 1] * 20, sampling) for i in range(requests)])
    return steps, engine


def test_a_step_takes_what_the_host_takes_where_the_host_is_slower() -> None:
    """Results are there before they are waited for, and yet it is known how often tokens come."""
    steps, engine = serve(HostAndDevice(1.5 * MS, 1.2 * MS, 9 * MS), requests=1)
    decodes = [step for step in steps if not step.chunks]
    known = [step.seconds for step in decodes if step.is_exact]
    assert len(known) >= len(decodes) - 2
    assert np.median(known) == pytest.approx(1.5 * MS + READ)
    assert engine.predictor.decode_factor == pytest.approx((1.5 * MS + READ) / (2 * MS))


@given(
    host=st.floats(0.1, 5),
    decode=st.floats(0.1, 5),
    prompt=st.floats(1, 50),
    run_ahead=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_known_times_are_near_the_truth(host: float, decode: float, prompt: float, run_ahead: int, seed: int) -> None:
    """Whoever takes the tokens now and then takes his time: what steps took meanwhile is not known."""
    executor, rng = HostAndDevice(host * MS, decode * MS, prompt * MS), np.random.default_rng(seed)
    steps: list[StepMetrics] = []
    config = EngineConfig(
        token_budget=32, max_running=4, page_size=4, num_pages=512, prefix_cache=False, run_ahead=run_ahead
    )
    engine = Engine(MODEL, None, config, executor=executor, clock=executor.clock, predictor=CURVE, monitor=steps.append)
    for i in range(6):
        engine.submit(Request([i + 1] * 20, SamplingParams(max_tokens=12, ignore_eos=True)))
    while engine.has_work:
        engine.step()
        executor.now += float(rng.choice([0.0, 0.5]))
    for step in steps:
        device = (prompt if step.chunks else decode) * MS
        if step.is_exact:
            assert device / 3 <= step.seconds + 1e-9
            assert step.seconds <= device + (run_ahead + 1) * host * MS + READ + 1e-9


def test_steps_whose_beginning_nobody_saw_are_not_known() -> None:
    """After a pause of whoever takes the tokens, all results of steps that ran ahead are there."""
    executor, steps = HostAndDevice(0.1 * MS, 5 * MS, 5 * MS), list[StepMetrics]()
    config = EngineConfig(token_budget=32, max_running=4, page_size=4, num_pages=512, run_ahead=3)
    engine = Engine(MODEL, None, config, executor=executor, clock=executor.clock, predictor=CURVE, monitor=steps.append)
    engine.submit(Request([1] * 20, SamplingParams(max_tokens=30, ignore_eos=True)))
    for number in range(30):
        engine.step()
        executor.now += 1.0 if number % 7 == 6 else 0.0
    short = [step for step in steps if step.seconds < 4 * MS]
    assert len(short) == 4
    assert not any(step.is_exact for step in short)
    assert [step.seconds for step in steps if step.is_exact] == pytest.approx([5 * MS] * 22, rel=0.05)


def test_a_profile_measures_steps_as_they_follow_each_other() -> None:
    """The host's work is hidden behind the device's, or the other way round."""
    for host, device in ((1.5, 1.0), (0.5, 4.0)):
        executor = HostAndDevice(host * MS, device * MS, device * MS)
        config = EngineConfig(token_budget=32, max_running=4, page_size=4, num_pages=512)
        engine = Engine(MODEL, None, config, executor=executor, clock=executor.clock)
        measured = measure(engine, [BatchShape(2, 8, 0, 0), BatchShape(1, 8, 20, 4)], 2, clock=executor.clock)
        assert [seconds for _, seconds in measured] == pytest.approx([max(host, device) * MS + READ] * 2, rel=0.03)


# Corrections.


def test_decodes_and_prompts_are_corrected_apart() -> None:
    steps, engine = serve(HostAndDevice(0.1 * MS, 6 * MS, 1.8 * MS), requests=40, tokens=8, run_ahead=1)
    for prompts in (False, True):
        late = [step for step in steps[len(steps) // 2 :] if step.is_exact and bool(step.chunks) == prompts]
        assert len(late) > 10
        assert [step.predicted / step.seconds for step in late] == pytest.approx([1.0] * len(late), rel=0.1)
    assert engine.predictor.decode_factor > 2 > engine.predictor.prompt_factor


def test_a_kind_without_measurements_of_its_own_goes_by_all() -> None:
    corrected = Corrected(CURVE)
    decodes, prompt = Work(4, 4, 100), Work().with_chunk(0, 16, True)
    for _ in range(8):
        corrected.observe(prompt, 3 * CURVE.seconds(prompt))
    assert (corrected.decode_factor, corrected.prompt_factor) == (3, 3)
    for _ in range(8):
        corrected.observe(decodes, 0.5 * CURVE.seconds(decodes))
    assert (corrected.decode_factor, corrected.prompt_factor) == (0.5, 3)
    assert corrected.seconds(decodes) == 0.5 * CURVE.seconds(decodes)
    assert corrected.seconds(prompt) == 3 * CURVE.seconds(prompt)
    for _ in range(100):
        corrected.observe(decodes, 0.5 * CURVE.seconds(decodes))
    assert corrected.prompt_factor == 3


# Reports.


def test_errors_are_reported_in_the_mean_and_weighted_by_time() -> None:
    def step(seconds: float, predicted: float, is_exact: bool = True) -> StepMetrics:
        return StepMetrics(0, 0.0, seconds, is_exact, predicted, 1, ())

    record = Record(steps=[step(1.0, 3.0), step(9.0, 9.9), step(5.0, 50.0, False), step(0.0, 1.0)], seconds=15.0)
    summary = summarize(record)
    assert summary["prediction_error"] == pytest.approx((2.0 + 0.1) / 2)
    assert summary["prediction_error_by_time"] == pytest.approx((2.0 + 0.9) / 10)
    summary["prompt_tokens"] = 1
    assert "off by 105.0% in the mean, 29.0% weighted by time, of 2 steps" in table(summary)
    assert summarize(Record(seconds=1.0))["prediction_error_by_time"] is None
