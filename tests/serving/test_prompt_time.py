"""What a long prompt is predicted to take is what its steps are predicted to take, as it grows from rank to rank."""

import dataclasses

import pytest
from bare_scheduler import BareScheduler

from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.serving.predictor.roofline import roofline
from longctx.serving.scheduler.forecast import PromptTime
from longctx.simulation import Instance, Simulation
from longctx.simulation.workloads import WorkloadRequest

MODEL = dataclasses.replace(LlamaConfig.preset("llama-3.1-8b"), max_positions=4_200_000)


def make_instance(plan: ParallelPlan, rows: int, tpot: float | None, num_pages: int = 16_000) -> Instance:
    """Llama 3.1 8B on H100s over RDMA, pages of 256 tokens."""
    topology = Topology.preset("h100-rdma")
    predictor = roofline(MODEL, topology, rows, stage=plan.stage, tensor=plan.tensor, context=plan.context)
    config = EngineConfig(
        chunking="static",
        token_budget=rows,
        max_running=8,
        page_size=256,
        num_pages=num_pages,
        prefix_cache=False,
        slo=Slo(tpot=tpot),
    )
    return Instance(MODEL, config, predictor, plan)


@pytest.mark.parametrize(
    ("tokens", "rank_tokens", "exchange", "placement"),
    [
        (3_900_000, 1_000_000, "kvp", "grow"),
        (1_000_000, 300_000, "auto", "grow"),
        (1_000_000, 40_000, "kvp", "grow"),  # many rounds over all ranks
        (1_000_000, None, "pass_q", "grow"),
        (1_000_000, None, "pass_kv", "interleave"),
        (1_000_000, None, "kvp", "interleave"),
        (50_000, 10_000, "auto", "grow"),
    ],
)
def test_a_prompt_takes_what_was_predicted(tokens: int, rank_tokens: int | None, exchange: str, placement: str) -> None:
    """TP 4 and 4 stages, as in Mnemosyne's figure 18; on 4 ranks."""
    plan = ParallelPlan(4, 4, 4, exchange, placement, rank_tokens)  # type: ignore[arg-type]
    instance = make_instance(plan, 4096, None)
    predicted = instance.core.scheduler.forecast.time.prefill_seconds(0, tokens)
    record = Simulation([instance]).run([WorkloadRequest(0.0, tokens, 1)])
    steps = [max(step.rank_seconds) for step in record.steps if step.chunks]
    assert predicted == pytest.approx(sum(steps), rel=0.03)
    (served,) = record.served
    assert served.metrics.ttft_deadline == pytest.approx(max(1.0, 5 * predicted))
    # The last chunks leave the pipeline after the prompt has been planned.
    assert predicted * 0.97 < served.metrics.ttft < predicted * 1.03 + 3 * max(steps)


def test_the_rest_of_a_prompt_is_predicted_as_it_is_read() -> None:
    plan = ParallelPlan(1, 4, 8, "kvp", rank_tokens=200_000)
    instance = make_instance(plan, 4096, None)
    scheduler, forecast = instance.core.scheduler, instance.core.scheduler.forecast
    left: list[tuple[float, float]] = []

    def note(record: object) -> None:
        for sequence in scheduler.running.prefilling:
            left.append(
                (sequence.prefill_remaining, forecast.time.prefill_seconds(sequence.computed, sequence.length, None))
            )

    Simulation([instance]).run([WorkloadRequest(0.0, 700_000, 1)], progress=note)
    assert len(left) > 150
    for remaining, predicted in left:
        assert remaining == pytest.approx(predicted, rel=0.03, abs=0.01)


def test_who_is_on_more_ranks_is_promised_less_time() -> None:
    """Less than on one rank, whose attention grows with the whole context; and the deadline follows."""
    seconds = [
        make_instance(
            ParallelPlan(context=4, tensor=8, exchange="kvp", rank_tokens=limit), 4096, None
        ).core.scheduler.forecast.time.prefill_seconds(0, 3_900_000)
        for limit in (4_000_000, 1_000_000)
    ]
    assert seconds[1] < 0.6 * seconds[0]


def test_the_limit_of_a_rank_follows_the_tpot_target() -> None:
    """A chunk runs beside decodes: 30 ms allow less than a decode alone could read, and 100 ms more."""
    placer = make_instance(ParallelPlan(4, 4, 4), 2048, 0.03).core.scheduler.forecast.time.placer
    limits = [256 * placer.limit(tpot) for tpot in (0.03, 0.1, None)]
    assert limits[0] < 1_000_000
    assert limits[0] < limits[1] < limits[2]


def test_prompts_are_predicted_once_and_follow_the_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, a step does not predict them anew when the device turns out to be slower."""
    predicted: list[tuple[int, int]] = []
    predict = PromptTime.prefill_seconds

    def note(time: PromptTime, start: int, stop: int, tpot: float | None = None) -> float:
        predicted.append((start, stop))
        return predict(time, start, stop, tpot)

    monkeypatch.setattr(PromptTime, "prefill_seconds", note)
    run = BareScheduler(ParallelPlan(context=4, exchange="kvp", rank_tokens=40), 100)
    sequences = [run.add(200 + i, 4) for i in range(8)]  # no last step of one token, which would count as a decode
    assert predicted == [(0, 200 + i) for i in range(8)]
    deadlines = [sequence.deadline for sequence in sequences]
    predictor, forecast = run.scheduler.chunker.predictor, run.scheduler.forecast
    for factor in (1.5, 1.2):
        predictor.prompt_factor = factor
        predicted.clear()
        forecast.rescale_predictions(sequences)
        assert not predicted
        for sequence in sequences:
            assert sequence.prefill_remaining == pytest.approx(
                forecast.time.prefill_seconds(0, sequence.length), rel=1e-9
            )
    assert [sequence.deadline for sequence in sequences] == deadlines
