"""Virtual time: how long requests take on a pipeline of several stages, by hand."""

from collections.abc import Callable

import pytest

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, Output, ParallelPlan, Request, SamplingParams, StepMetrics
from longctx.serving.scheduler.batch import Batch
from longctx.simulation import VirtualExecutor
from longctx.simulation.instance.virtual_executor import DeviceSpeed

STAGES = 4
MODEL = Llama(LlamaConfig(50, 8, 8, 4, 1, 1, 8, max_positions=10_000))


def per_stage(batch: Batch) -> float:
    """10 ms, whatever the batch."""
    return 10e-3


def per_token(batch: Batch) -> float:
    """1 ms for each token in each stage."""
    return 1e-3 * batch.num_tokens


def serve(
    prompts: list[int],
    output_tokens: int,
    seconds: Callable[[Batch], float],
    stages: int = STAGES,
    monitor: Callable[[StepMetrics], object] | None = None,
    **options: object,
) -> tuple[list[Output], VirtualExecutor]:
    """Prompts of such lengths, all at once."""
    options = {"token_budget": 16, "max_running": 8, "page_size": 4, "num_pages": 256, "prefix_cache": False} | options
    executor = VirtualExecutor(seconds, 50, stages)
    engine = Engine(
        MODEL,
        None,
        EngineConfig(**options),  # type: ignore[arg-type]
        executor=executor,
        clock=executor.clock,
        plan=ParallelPlan(stage=stages),
        monitor=monitor,
    )
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    requests = [Request([i + 1] * length, sampling, request_id=str(i)) for i, length in enumerate(prompts)]
    return engine.generate(requests), executor


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_token_takes_all_stages(stages: int, run_ahead: int) -> None:
    """And a step one tick, also where the engine waits for several, since other stages are idle."""
    steps: list[StepMetrics] = []
    (output,), executor = serve([8], 5, per_stage, stages, steps.append, run_ahead=run_ahead)
    assert output.metrics.ttft == pytest.approx(stages * 10e-3)
    assert output.metrics.tpot == pytest.approx(stages * 10e-3)
    assert executor.now == pytest.approx(5 * stages * 10e-3)
    assert [step.seconds for step in steps] == pytest.approx([10e-3] * 5)


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_chunks_follow_each_other_densely(chunks: int) -> None:
    (output,), _ = serve([16 * chunks], 1, per_stage)
    assert output.metrics.ttft == pytest.approx((chunks + STAGES - 1) * 10e-3)


def test_a_tick_takes_as_long_as_the_slowest_batch_in_the_stages() -> None:
    """Chunks of 16, 16 and 8 tokens: the last is alone with idle stages in the sixth tick only."""
    (output,), executor = serve([40], 3, per_token)
    ticks = [16, 16, 16, 16, 16, 8]
    assert output.metrics.ttft == pytest.approx(1e-3 * sum(ticks))
    assert output.metrics.tpot == pytest.approx(STAGES * 1e-3)
    assert executor.now == pytest.approx(1e-3 * (sum(ticks) + 2 * STAGES))


def test_requests_share_the_stages() -> None:
    """One prompt's chunks fill the stages that the other leaves idle while its token is in them."""
    (first, second), executor = serve([16, 16], 4, per_stage)
    assert first.metrics.ttft == pytest.approx(STAGES * 10e-3)
    assert second.metrics.ttft == pytest.approx((STAGES + 1) * 10e-3)
    assert first.metrics.tpot == second.metrics.tpot == pytest.approx(STAGES * 10e-3)
    assert executor.now == pytest.approx((4 * STAGES + 1) * 10e-3)


def test_tokens_do_not_depend_on_the_stages() -> None:
    tokens = [[output.token_ids for output in serve([40, 3, 17], 6, per_token, stages)[0]] for stages in (1, 2, 4)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({token for row in tokens[0] for token in row}) > 5


def test_stages_must_be_positive() -> None:
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        VirtualExecutor(per_stage, 50, 0)


def test_a_slow_moment_meets_whatever_runs_then() -> None:
    speed = DeviceSpeed([(10.0, 11.0, 1.0), (11.0, 14.0, 1.0), (20.0, 20.5, 1.0)])
    assert speed.seconds(10.0, 1.0) == pytest.approx(1.0)
    assert speed.seconds(11.0, 1.0) == pytest.approx(3.0)
    assert speed.seconds(10.5, 1.0) == pytest.approx(0.5 + 1.5)
    assert speed.seconds(15.0, 2.0) == pytest.approx(2.0)  # nothing was measured then
    assert speed.seconds(20.0, 2.0) == pytest.approx(0.5 + 1.0)
    assert speed.seconds(100.0, 2.0) == pytest.approx(2.0)
