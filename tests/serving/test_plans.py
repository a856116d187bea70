"""Engines on fake devices of many stages and ranks: right tokens under every plan, nothing lost or read early."""

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from fake_device import MODEL, expected_tokens, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from workload import Workload

from longctx.models import Llama
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams, Slo
from longctx.serving.engine.memory import estimate, param_bytes
from longctx.serving.executor import step_shapes
from longctx.serving.kv_cache.placement import Grown
from longctx.serving.parallel_plan import EXCHANGES
from longctx.serving.predictor import CurvePredictor
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.step_budget import StepBudget

PLANS = st.builds(
    ParallelPlan,
    stage=st.sampled_from([1, 2, 3, 4]),
    context=st.sampled_from([1, 2, 3, 4, 5]),
    exchange=st.sampled_from(EXCHANGES),
    placement=st.sampled_from(["grow", "interleave"]),
    rank_tokens=st.sampled_from([None, 4, 16, 40]),
)


@pytest.fixture(autouse=True, scope="module")
def short_messages() -> Iterator[None]:
    """Short sequences have messages of several lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_shapes, "_LEAST_PAGES", 2)
        yield


@settings(max_examples=8)
@given(
    plan=PLANS,
    seed=st.integers(0, 2**20),
    num_pages=st.integers(20, 60),
    page_size=st.sampled_from([1, 2, 4, 8]),
    run_ahead=st.integers(1, 4),
    admission=st.sampled_from(["reserve", "optimistic"]),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(["fcfs", "edf", "srpf", "lrs", "lrs_relative", "ilrs"]),
    chunking=st.sampled_from(["static", "static:7", "adaptive"]),
    window=st.sampled_from([None, 1, 7, 30]),
)
def test_random_workloads_give_the_oracles_tokens(
    plan: ParallelPlan,
    seed: int,
    num_pages: int,
    page_size: int,
    run_ahead: int,
    admission: str,
    prefix_cache: bool,
    policy: str,
    chunking: str,
    window: int | None,
) -> None:
    engine = make_engine(
        num_pages * 4 // min(page_size, 4),
        page_size,
        plan,
        window=window,
        buckets=(4, 16),
        run_ahead=run_ahead,
        admission=admission,
        prefix_cache=prefix_cache,
        policy=policy,
        chunking=chunking,
        slo=Slo(ttft_least=1e-4 if seed % 2 else 1.0, tpot=2e-3 if seed % 3 else 1.1e-3),
    )
    Workload(engine, seed).run(100)


@pytest.mark.parametrize(("admission", "placement"), [("reserve", "interleave"), ("optimistic", "grow")])
def test_thousands_of_events_with_little_memory(admission: str, placement: str) -> None:
    """The pools are so small that memory limits what runs."""
    plan = ParallelPlan(2, 3, exchange="auto", placement=placement, rank_tokens=30)
    engine = make_engine(28, 2, plan, admission=admission, buckets=(4, 16))
    workload = Workload(engine, 3)
    workload.run(300)
    stats = engine.stats()
    assert stats.cached_tokens > 0
    assert stats.pages_evicted > 0
    assert (stats.preemptions > 0) == (admission == "optimistic")


def test_a_prompt_goes_through_the_stages_without_gaps() -> None:
    """M chunks take M + S - 1 steps, and stages are idle S * (S - 1) times in all."""
    stages, chunks = 4, 7
    engine = make_engine(60, 2, ParallelPlan(stages))
    batches = record(engine)
    engine.submit(Request([1] * (16 * chunks), SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()
    assert [bool(batch.chunks) for batch in batches] == [True] * chunks + [False] * (stages - 1)
    assert engine.stats().idle_stage_steps == stages * (stages - 1)


def test_other_requests_fill_the_gaps_of_decodes() -> None:
    """With a long prompt, short requests and decodes, stages are idle only at the beginning and at the end."""
    stages = 4
    engine = make_engine(300, 2, ParallelPlan(stages))
    batches = record(engine)
    engine.submit(Request([1] * 200, SamplingParams(max_tokens=4, ignore_eos=True)))
    for prompt in ([2] * 5, [3] * 9, [4] * 3):
        engine.submit(Request(prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    last = max(batch.index for batch in batches if any(not chunk.decodes for chunk in batch.chunks))
    assert all(batch.chunks for batch in batches[: last + 1])
    after = sum(not batch.chunks for batch in batches)
    assert engine.stats().idle_stage_steps == stages * (stages - 1) // 2 + sum(
        sum(not b.chunks for b in batches[max(0, i - stages + 1) : i + 1]) for i in range(len(batches))
    )
    assert after <= 4 * stages


def test_preempted_completions_of_a_prompt_are_recomputed() -> None:
    """Memory runs out again and again, with 1, 3 and 4 stages."""
    for stages in (1, 3, 4):
        engine = make_engine(14, 2, ParallelPlan(stages), admission="optimistic", prefix_cache=stages != 3)
        params = SamplingParams(max_tokens=8, temperature=1.0, n=2, seed=5, ignore_eos=True)
        prompts = [[i, 1, 2, 3, 4] for i in range(5)]
        outputs = engine.generate(prompts, params)
        expected = [expected_tokens(prompt, params, n) for prompt in prompts for n in range(2)]
        assert [output.token_ids for output in outputs] == expected
        assert engine.stats().preemptions > 0


def test_cached_pages_that_leave_no_room_for_the_rest_are_recomputed() -> None:
    engine = make_engine(4, 4, ParallelPlan(1, 2, placement="interleave"))
    first = Request([1] * 9, SamplingParams(max_tokens=7, ignore_eos=True))
    for prompt in ([1] * 9, [2] * 3, [1] * 12, [1] * 20):
        (output,) = engine.generate([Request(prompt, first.sampling)])
        assert output.token_ids == expected_tokens(prompt, first.sampling)


def test_a_token_comes_after_all_stages() -> None:
    """A sequence decodes once in as many steps as there are stages, and others fill the steps between."""
    stages = 3
    engine = make_engine(60, 2, ParallelPlan(stages))
    batches = record(engine)
    outputs = engine.generate([[1, 2], [3], [4, 5, 6]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [
        expected_tokens(prompt, SamplingParams(max_tokens=8)) for prompt in ([1, 2], [3], [4, 5, 6])
    ]
    steps = [batch.index for batch in batches if any(chunk.decodes for chunk in batch.chunks)]
    assert min(b - a for a, b in itertools.pairwise(steps)) >= 1
    by_sequence: dict[str, list[int]] = {}
    for batch in batches:
        for chunk in batch.chunks:
            by_sequence.setdefault(chunk.sequence.name, []).append(batch.index)
    assert all(b - a >= stages for found in by_sequence.values() for a, b in itertools.pairwise(found))


def test_in_flight_rows_grow_by_one_bucket_in_as_many_steps_as_stages() -> None:
    stages, buckets = 3, (1, 2, 4, 8, 16)
    engine = make_engine(200, 2, ParallelPlan(stages), buckets=buckets)
    batches = record(engine)
    engine.submit(Request([1], SamplingParams(max_tokens=60, ignore_eos=True)))
    for _ in range(10):
        engine.step()
    begin = len(batches)
    engine.submit(Request([2] * 200, SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()
    sizes = [
        bisect.bisect_left(buckets, batch.num_tokens) if batch.chunks else -1 for batch in batches[begin - stages :]
    ]
    shapes = [max(sizes[max(0, i - stages + 1) : i + 1]) for i in range(len(sizes))]  # a step's largest
    for i in range(stages, len(shapes)):
        assert shapes[i] <= max(shapes[i - stages], 0) + 1
    assert max(shapes) == len(buckets) - 1


def test_short_requests_go_to_the_least_loaded_rank() -> None:
    """While no request spans ranks, each rank batches requests of its own."""
    engine = make_engine(60, 2, ParallelPlan(1, 3, exchange="kvp"))
    batches = record(engine)
    prompts = [[i] * 12 for i in range(6)]
    engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    homes: dict[str, set[tuple[int, ...]]] = {}
    for batch in batches:
        for chunk in batch.chunks:
            homes.setdefault(chunk.sequence.name, set()).add(chunk.ranks)
    assert all(len(ranks) == 1 for ranks in homes.values())
    assert Counter(next(iter(ranks)) for ranks in homes.values()) == {(0,): 2, (1,): 2, (2,): 2}
    rows = Counter[tuple[int, ...]]()
    for chunk in batches[0].chunks:
        rows[chunk.ranks] += chunk.num_tokens
    assert rows == {(0,): 16, (1,): 16, (2,): 16}  # one rank's rows are not another's


def record(engine: Engine) -> list[Batch]:
    """Record the batches that an engine submits from now on."""
    batches: list[Batch] = []
    submit = engine.executor.submit

    def note(batch: Batch) -> object:
        batches.append(batch)
        return submit(batch)

    engine.executor.submit = note  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize(
    ("plan", "model", "devices", "message"),
    [
        (ParallelPlan(4, 4, 1), {}, 8, "4 \\* 4 \\* 1 = 16 devices, and there are 8"),
        (ParallelPlan(8), {"num_layers": 7}, 8, "stage must be at most the model's 7 layers, got 8"),
        (ParallelPlan(1, 1, 3), {}, 8, "tensor must divide the model's 4 query heads, got 3"),
        (ParallelPlan(1, 1, 4), {"intermediate_size": 6}, 8, "6 feed-forward columns"),
        (ParallelPlan(1, 1, 4), {"num_heads": 12, "num_kv_heads": 6}, 8, "6 KV heads or be a multiple of them, got 4"),
        (
            ParallelPlan(1, 4, 2, ffn="all"),
            {},
            8,
            r"context \* tensor must divide the model's 4 query heads with ffn='all'",
        ),
        (
            ParallelPlan(1, 3, 1, ffn="all"),
            {"num_heads": 6, "num_kv_heads": 2, "intermediate_size": 8},
            8,
            "8 feed-forward columns with",
        ),
    ],
)
def test_plans_that_do_not_suit_a_model_are_refused(
    plan: ParallelPlan, model: dict[str, int], devices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan.check(dataclasses.replace(MODEL.config, **model), devices)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stage": 0}, ValueError, "stage must be"),
        ({"context": 2.5}, TypeError, "context must be"),
        ({"exchange": "ring"}, ValueError, "exchange must be one of auto, kvp, pass_q, pass_kv"),
        ({"placement": "random"}, ValueError, "placement must be one of grow, interleave"),
        ({"rank_tokens": 0}, ValueError, "rank_tokens must be"),
        ({"ffn": "context"}, ValueError, "ffn must be one of tensor, all, got 'context'"),
    ],
)
def test_invalid_plans_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ParallelPlan(**options)


@pytest.mark.parametrize("num_devices", [2.5, "2", True])
def test_a_number_of_devices_that_is_none_is_named(num_devices: Any) -> None:
    with pytest.raises(TypeError, match="num_devices must be an integer"):
        ParallelPlan().check(MODEL.config, num_devices)


def test_devices_of_a_larger_mesh_need_less_each() -> None:
    config = EngineConfig(page_size=4, max_running=2, token_budget=8)
    alone, spread = (
        estimate(MODEL, config, mesh, np.float32, 10, 64) for mesh in (make_mesh(), make_mesh(stage=2, tensor=2))
    )
    # CPU devices share one memory, so that of all four counts: parameters and pages are divided, but for the norms.
    assert alone.weights < spread.weights < 1.5 * alone.weights
    assert spread.pages == alone.pages
    assert spread.steps > alone.steps


def test_tied_embeddings_are_one_array_on_one_device() -> None:
    tied = Llama(dataclasses.replace(MODEL.config, tie_embeddings=True))
    loaded = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(tied.abstract_params()))
    assert param_bytes(tied, make_mesh(context=2), np.float32) == loaded
    assert param_bytes(tied, make_mesh(tensor=2), np.float32) > loaded / 2


def test_a_rank_has_room_beside_rows_on_other_ranks() -> None:
    """A prompt will span two ranks, and another one fills a step of the second of them."""
    step = StepBudget(
        ParallelPlan(context=2, exchange="kvp"), 16, CurvePredictor((1, 2), (0.0, 0.0), 0.0, 0.0, 0.0), 64, []
    )
    here, there = Sequence("here", 0, 400, 1), Sequence("there", 1, 240, 1)
    here.placement, there.placement = Grown(2, [(0, 0), (16, 1)]), Grown(2, [(0, 1)])
    step.take(there, 64)
    assert step.room(here) == 64
    step.take(here, 64)
    assert step.room(here) == step.room(there) == 0
