"""Ranks that step together: how long they wait for each other, by prediction, in virtual time."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.models import LlamaConfig
from longctx.serving import EngineConfig, ParallelPlan, Slo, StepMetrics
from longctx.serving.predictor import CurvePredictor, Work
from longctx.serving.scheduler.chunking import smallest_chunk
from longctx.simulation import Instance, Record, Simulation
from longctx.simulation.reports.plots import draw_record, write_drawing
from longctx.simulation.reports.report import idle_shares, summarize, table
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(50, 8, 8, 1, 1, 1, 8, max_positions=400_000)
# 5 ms whatever there is, 10,000 tokens a second besides, and 100 million pairs.
DEVICE = CurvePredictor((1, 2), (0.0051, 0.0052), 1e-8, 2e-8, 1e-5)
BUDGET, LONG = 512, 100_000
FULL = DEVICE.seconds(Work().with_chunk(0, BUDGET, True))


def serve(requests: list[WorkloadRequest], ranks: int, **options: object) -> Record:
    options = {"token_budget": BUDGET, "num_pages": 8192, "prefix_cache": False, "chunking": "static"} | options
    plan = ParallelPlan(context=ranks, exchange="kvp", rank_tokens=LONG)
    instance = Instance(MODEL, EngineConfig(**options), DEVICE, plan)  # type: ignore[arg-type]
    return Simulation([instance]).run(requests)


def load(ranks: int, output_tokens: int, with_long: bool = True) -> list[WorkloadRequest]:
    """A long prompt, and for each other rank 25 shorter ones: more than it can read in the time in which they come."""
    rng = np.random.default_rng(0)
    requests = [WorkloadRequest(0.0, LONG, 1)] if with_long else []
    arrivals = np.cumsum(rng.exponential(0.35 / (ranks - 1), 25 * (ranks - 1)))
    for at in arrivals.tolist():
        requests.append(WorkloadRequest(at, int(rng.integers(1000, 8000)), output_tokens, number=len(requests)))
    return requests


def test_the_idle_share_of_a_step() -> None:
    step = StepMetrics(0, 1.0, 1.0, True, 1.0, 0, (), rank_seconds=(0.5, 2.0, 0.0))
    assert step.idle_share == (0.75, 0.0, 1.0)
    assert step._replace(rank_seconds=(0.0, 0.0)).idle_share == (0.0, 0.0)
    assert step._replace(rank_seconds=(3.0,)).idle_share == (0.0,)
    longer = step._replace(seconds=3.0, rank_seconds=(2.0, 2.0, 1.0))
    assert idle_shares([step, longer]) == pytest.approx([0.75 / 4, 0.0, (1.0 + 1.5) / 4])
    assert idle_shares([step._replace(rank_seconds=(3.0,))]) is None


@pytest.mark.parametrize(
    ("ranks", "chunking", "output_tokens"),
    [
        (2, "static", 1),
        (3, "adaptive", 30),
        pytest.param(8, "static", 1, marks=pytest.mark.slow),
        pytest.param(8, "adaptive", 30, marks=pytest.mark.slow),
    ],
)
def test_ranks_do_not_wait_for_a_long_prompt_of_one_of_them(ranks: int, chunking: str, output_tokens: int) -> None:
    """While there is enough to read on all ranks.

    They wait for 1, 3 and 4 % of the time where the long prompt's chunk
    has as many rows as fit into the budget, and for 26, 36 and 48 % where it has as many as keep the decodes' target.

    Shorter prompts wait for others of their own rank alone, about as long as if the long one had a rank for itself.
    """
    requests = load(ranks, output_tokens)
    record = serve(requests, ranks, chunking=chunking)
    steps = [step for step in record.steps if step.finished < requests[-1].arrival]
    shares = idle_shares(steps)
    assert shares is not None
    assert np.mean(shares) < 0.025
    assert all(step.idle_share == pytest.approx(1 - np.array(step.rank_seconds) / step.predicted) for step in steps)

    short = np.median([x.ttft for x in record.served if x.metrics.prompt_tokens < LONG])
    alone = np.median([x.ttft for x in serve(load(ranks, output_tokens, False), ranks - 1, chunking=chunking).served])
    assert short < 1.5 * alone + 2 * FULL


def test_a_long_prompt_with_a_mesh_for_itself_has_whole_chunks() -> None:
    (served,) = serve([WorkloadRequest(0.0, 20_000, 1)], 4).served
    assert served.ttft == pytest.approx(DEVICE.prefill_seconds(0, 20_000, BUDGET))


def test_a_long_prompt_beside_others_keeps_good_chunks() -> None:
    """The most urgent prompt is read at 80 % of its speed at least, as far as rows allow."""
    short = [WorkloadRequest(0.01 * i, 6000, 1, number=i + 1) for i in range(100)]
    record = serve([WorkloadRequest(0.0, 60_000, 1), *short], 2, policy="fcfs")
    (long,) = [x for x in record.served if x.metrics.prompt_tokens == 60_000]
    assert long.ttft < DEVICE.prefill_seconds(0, 60_000, BUDGET) / 0.79


@pytest.mark.parametrize("stages", [1, 2])
def test_decodes_of_other_ranks_keep_their_target_beside_static_chunks(stages: int) -> None:
    """A chunk of all rows takes up to 0.56 s after 100,000 tokens. On the decode's own rank it would take that."""
    requests = [WorkloadRequest(0.0, LONG, 1), WorkloadRequest(0.1, 50, 300, number=1)]
    model = LlamaConfig(50, 8, 8, 2, 1, 1, 8, max_positions=400_000)
    config = EngineConfig(
        token_budget=BUDGET, num_pages=8192, prefix_cache=False, chunking="static", slo=Slo(tpot=0.1 * stages)
    )
    for ranks, is_bounded in ((1, False), (2, True)):
        plan = ParallelPlan(stages, ranks, exchange="kvp", rank_tokens=LONG)
        record = Simulation([Instance(model, config, DEVICE, plan)]).run(requests)
        mixed = [step.predicted for step in record.steps if step.decodes and step.chunks]
        assert (max(mixed) <= 0.1) == is_bounded
        assert len(mixed) > 50


@pytest.mark.parametrize("stages", [2, 3])
def test_a_decode_in_a_later_stage_keeps_its_target(stages: int) -> None:
    """Of as many batches one has the decode, but a step takes the largest of those in the stages."""
    requests = [WorkloadRequest(0.0, 50, 60), WorkloadRequest(0.1, 40_000, 1, number=1)]
    model = LlamaConfig(50, 8, 8, stages, 1, 1, 8, max_positions=400_000)
    slo = Slo(tpot=0.06 * stages, step_seconds=None)
    config = EngineConfig(token_budget=BUDGET, num_pages=8192, prefix_cache=False, chunking="adaptive", slo=slo)
    record = Simulation([Instance(model, config, DEVICE, ParallelPlan(stages))]).run(requests)
    (decoding,) = [x.metrics for x in record.served if x.metrics.output_tokens > 1]
    assert decoding.longest_gap is not None
    assert decoding.longest_gap <= slo.tpot + 1e-9  # type: ignore[operator]
    assert max(step.predicted for step in record.steps) > 0.1  # when nobody decodes


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**20),
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
    stages=st.sampled_from([1, 2]),
    policy=st.sampled_from(["fcfs", "lrs", "lrs_relative", "ilrs"]),
    chunking=st.sampled_from(["static", "adaptive"]),
    exchange=st.sampled_from(["kvp", "pass_q"]),
    step_seconds=st.sampled_from([None, 0.02, 0.1]),
)
def test_random_loads_are_served(
    seed: int, ranks: int, stages: int, policy: str, chunking: str, exchange: str, step_seconds: float | None
) -> None:
    """No step has more rows than the budget on any rank, and every request ends.

    Beside decodes a step takes no longer than their target, but for one smallest efficient chunk, whoever else waits.
    """
    rng = np.random.default_rng(seed)
    lengths = [int(rng.choice([10, 700, 9000])) for _ in range(20)]
    arrivals = np.cumsum(rng.exponential(0.1, len(lengths))).tolist()
    requests = [
        WorkloadRequest(at, length, int(rng.integers(1, 20)), number=i)
        for i, (at, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]
    tpot = float(rng.choice([0.02, 0.2]))
    config = EngineConfig(
        token_budget=128,
        max_running=int(rng.integers(4, 20)),
        page_size=16,
        num_pages=1000,
        prefix_cache=False,
        policy=policy,
        chunking=chunking,
        slo=Slo(step_seconds=step_seconds, tpot=tpot),
    )
    model = LlamaConfig(50, 8, 8, 2, 1, 1, 8, max_positions=20_000)
    plan = ParallelPlan(stages, ranks, exchange=exchange, rank_tokens=3000)  # type: ignore[arg-type]
    instance = Instance(model, config, DEVICE, plan)
    record = Simulation([instance]).run(requests)
    assert len(record.served) == len(requests)
    assert instance.core.pool.num_held == 0
    for step in record.steps:
        assert step.decodes + step.prompt_tokens <= 128 * ranks
        assert len(step.idle_share) == ranks
        assert min(step.idle_share) == 0 <= max(step.idle_share) <= 1
        if chunking == "adaptive" and exchange == "kvp" and step.decodes:
            starts = {at for at, _ in step.chunks}
            sizes = [(at, smallest_chunk(DEVICE, instance.core.scheduler.chunker.chunking, at, 0.5)) for at in starts]
            least = max((DEVICE.seconds(Work().with_chunk(at, size, True)) for at, size in sizes), default=0.0)
            assert step.predicted <= tpot / stages + least


def test_reports_say_how_long_ranks_wait(tmp_path: Path) -> None:
    record = serve(load(2, 5), 2)
    summary = summarize(record)
    assert summary["idle_share"] == pytest.approx(idle_shares(record.steps))
    assert "ranks wait" in table(summary)
    assert "ranks wait" not in table(summarize(serve([WorkloadRequest(0.0, 100, 1)], 1)))
    if importlib.util.find_spec("matplotlib"):
        write_drawing(lambda: draw_record(record), tmp_path / "figure.svg")
        text = (tmp_path / "figure.svg").read_text()
        for rank, share in enumerate(summary["idle_share"]):
            assert f"rank {rank}, {share:.0%} idle" in text
