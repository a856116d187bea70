"""Costs of layers with a sliding window: work, predicted seconds and memory, against sums by hand and the engine's."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.cluster.conductor.costs import PredictorCosts
from longctx.models import Llama, LlamaConfig
from longctx.models.layer_runs import layers_of_stages
from longctx.parallel import Topology, make_mesh
from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.engine.memory import estimate
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.window_pages import PageBytes
from longctx.serving.predictor import CurvePredictor, RuntimePredictor, Work
from longctx.serving.predictor.attention import NO_KERNEL, SlidingCost
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.file import predictor_from_dict, predictor_to_dict
from longctx.serving.predictor.fit import fit
from longctx.serving.predictor.runtime import curves_of
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.simulation.cluster.cluster_instance import ClusterInstance
from longctx.simulation.hardware import predictor
from longctx.simulation.planner.prompt import simulate_prompt
from longctx.simulation.planner.search import Goal, Planned, RejectedPlan, evaluate
from longctx.simulation.utilization import device_memory, max_tokens, model_bytes, model_flops

GEMMA = dataclasses.replace(LlamaConfig.preset("gemma3-270m"), max_positions=1 << 20)
LLAMA = dataclasses.replace(LlamaConfig.preset("llama-3-8b"), max_positions=1 << 20)
MISTRAL = LlamaConfig(32_000, 4096, 14_336, 32, 32, 8, 128, max_positions=1 << 20, sliding_window=4096)  # 7B, v0.1
MODELS = {"gemma": GEMMA, "mistral": MISTRAL, "llama": LLAMA}
H100 = Topology.preset("h100-nvlink")
WINDOW = 300
CURVE = CurvePredictor(
    (1, 512), (1e-3, 2e-3), 3e-8, 1e-7, 1e-4, overlap=0.7, sliding=SlidingCost(WINDOW, 2e-8, 5e-7, 0.6)
)
PROGRAMS = dataclasses.replace(
    RuntimePredictor.of_rows({8: 5e-3, 512: 2e-2}, (1, 16, 64), (3e-7, 1.5e-6, 3e-6), 1.5e-4),
    window=WINDOW,
    sliding_share=0.75,
)


def without_windows(model: LlamaConfig) -> LlamaConfig:
    return dataclasses.replace(model, sliding_window=None, sliding_layers=(), local_rope_theta=None)


def seen_by(model: LlamaConfig, layer: int, start: int, count: int) -> tuple[int, int]:
    """Pairs and keys of some queries in a layer, one query after the other."""
    window = model.sliding_window if model.sliding_layers and model.sliding_layers[layer] else None
    lengths = [
        position + 1 if window is None else min(position + 1, window) for position in range(start, start + count)
    ]
    return sum(lengths), start + count - (start + 1 - lengths[0])


@given(start=st.integers(0, 1000), count=st.integers(1, 400), window=st.integers(1, 700))
def test_work_counts_the_keys_that_each_query_sees(start: int, count: int, window: int) -> None:
    lengths = [min(position + 1, window) for position in range(start, start + count)]
    chunks = [(start, count, True), (5, 1, True), (1000, 1, False), (3, 2, False)]
    work = Work.of(chunks, window)
    others = [min(6, window), min(1001, window), min(4, window), min(5, window)]
    assert work.window_pairs == sum(lengths) + sum(others)
    first = start + 1 - lengths[0]  # the first token that some query sees
    assert work.window_keys == start + count - first + sum(others[:2]) + 5 - (4 - others[2])
    added = Work(window=window)
    for chunk in chunks:
        added = added.with_chunk(*chunk)
    assert added == work
    assert work._replace(window=0, window_decode_keys=0, window_chunks=()) == Work.of(chunks)
    assert Work.of(chunks[:1]).seen_through(window) == Work.of(chunks[:1], window)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(stage=2), ParallelPlan(stage=4)], ids=str)
def test_predicted_attention_is_that_of_each_layer_by_its_window(name: str, plan: ParallelPlan) -> None:
    """By the shares that the device reaches, in the stage that takes longest."""
    model, device = MODELS[name], H100.device
    found = dataclasses.replace(predictor(model, H100, plan), kernel=NO_KERNEL)
    cost = device.attention_cost(model.head_dim, 2)
    for chunks in ([(50_000, 1)], [(99, 1)], [(0, 2048)], [(4000, 512)], [(60_000, 256)], [(9, 1)] * 3 + [(10**5, 1)]):
        work = Work.of([(start, count, False) for start, count in chunks], model.sliding_window or 0)
        stages = []
        for layers in layers_of_stages(model.num_layers, plan.stage):
            seconds = 0.0
            for layer, (start, count) in itertools.product(layers, chunks):
                # A layer of zeros, of a smaller stage, takes as long as one without a window.
                pairs, keys = seen_by(LLAMA if layer is None else model, layer or 0, start, count)
                products = 4 * model.num_heads * model.head_dim * pairs / (device.flops["bfloat16"] * cost.prompt_share)
                reading = (
                    2 * model.num_kv_heads * model.head_dim * 2 * keys / (device.memory_bandwidth * cost.key_share)
                )
                seconds += products + reading - device.attention_overlap * min(products, reading)
            stages.append(seconds)
        assert found.seconds(work) - found.seconds(Work(work.rows)) == pytest.approx(max(stages), rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_model_flops_and_bytes_are_those_of_each_layer(name: str) -> None:
    model, chunks = MODELS[name], [(0, 3000, True), (70_000, 1, True), (100, 1, True), (5000, 100, False)]
    window = model.sliding_window or 0
    works = [Work.of(chunks, window), Work.of(chunks[:1])]
    for work, counted in zip(works, (chunks, chunks[:1]), strict=True):
        seen = [seen_by(model, layer, *chunk[:2]) for layer in range(model.num_layers) for chunk in counted]
        pairs, keys = (sum(each) for each in zip(*seen, strict=True))
        rest = model_flops(model, Work(work.rows, work.samples)), model_bytes(model, Work(work.rows))
        assert model_flops(model, work) - rest[0] == 4 * model.num_heads * model.head_dim * pairs
        assert model_bytes(model, work) - rest[1] == 4 * model.num_kv_heads * model.head_dim * keys


def test_a_model_without_a_window_is_predicted_as_before() -> None:
    found = predictor(LLAMA, H100)
    assert (found.sliding, found.window) == (None, 0)
    works = [Work.of([(9000, 300, True), (77, 1, True)]), Work(64, 64, 10**6)]
    bare = dataclasses.replace(found, sliding=SlidingCost(1 << 30, 0.0, 0.0, 0.5))
    for work in works:
        assert found.seconds(work) == bare.seconds(work) == found.seconds(work.seen_through(512))


@pytest.mark.parametrize("found", [CURVE, PROGRAMS], ids=["curve", "programs"])
@given(start=st.integers(0, 900), length=st.integers(1, 3000), chunk=st.integers(1, 512))
def test_prefill_seconds_equal_the_sum_of_steps(
    found: CurvePredictor | RuntimePredictor, start: int, length: int, chunk: int
) -> None:
    stop = start + length
    steps = [
        found.seconds(Work(window=WINDOW).with_chunk(at, min(chunk, stop - at), at + chunk >= stop))
        for at in range(start, stop, chunk)
    ]
    least = 1e-3 if isinstance(found, RuntimePredictor) and chunk > 64 else 1e-9  # tiles, of which one crosses
    assert found.prefill_seconds(start, stop, chunk) == pytest.approx(sum(steps), rel=least)


@given(start=st.integers(0, 900), count=st.integers(1, 512), decodes=st.lists(st.integers(0, 900), max_size=5))
def test_quicker_ways_give_the_same_seconds(start: int, count: int, decodes: list[int]) -> None:
    work = Work.of([(at, 1, True) for at in decodes], WINDOW)
    for found in (CURVE, PROGRAMS, Corrected(CURVE), predictor_from_dict(predictor_to_dict(CURVE))):
        assert found.window == WINDOW
        expected = found.seconds(work.with_chunk(start, count, False))
        assert curves_of(found)(work, start)(count) == expected


def test_a_fit_finds_how_keys_in_windows_count() -> None:
    rng, batches = np.random.default_rng(0), list[Work]()
    for _ in range(60):
        work = Work.of([(int(at), 1, True) for at in rng.integers(0, 3000, rng.integers(1, 8))], WINDOW)
        batches.append(work.with_chunk(int(rng.integers(0, 3000)), int(rng.integers(2, 300)), True))
    batches += [Work.of([(int(at), 1, True)], WINDOW) for at in rng.integers(0, 3000, 20)]
    measured = [(work, PROGRAMS.seconds(work)) for work in batches]
    found = fit(measured, PROGRAMS.buckets, (1, 16, 64), WINDOW, 0.75)
    for work in (Work.of([(90_000, 1, True)], WINDOW), Work.of([(50, 400, True)], WINDOW)):
        assert found.seconds(work) == pytest.approx(PROGRAMS.seconds(work), rel=1e-4)
    assert predictor_from_dict(predictor_to_dict(found)) == found


def test_exchanges_are_hidden_by_the_attention_of_each_kind_of_layer() -> None:
    """Of a ring, what full layers hide is of no use to sliding ones."""
    plan, topology = ParallelPlan(context=4, tensor=1), Topology.preset("h100-tcp")
    work = Work(window=512).with_sharded(1 << 18, 8192, 4, 1 << 16, exchange="pass_kv")
    mixed, alike = (predictor(model, topology, plan) for model in (GEMMA, without_windows(GEMMA)))
    sliding = predictor(dataclasses.replace(GEMMA, sliding_layers=(True,) * 18), topology, plan)
    linear = [found.seconds(Work(work.rows)) for found in (mixed, alike, sliding)]
    parts = [found.seconds(work) - rest for found, rest in zip((mixed, alike, sliding), linear, strict=True)]
    assert parts[0] == pytest.approx(parts[1] / 6 + parts[2] * 5 / 6)
    assert parts[2] < parts[0] < parts[1]


def test_decodes_are_predicted_by_lines_that_meet_at_the_window() -> None:
    costs = PredictorCosts(CURVE, 512, 1024.0)
    for tokens in (0, 500, WINDOW * 8, 10_000, 10**6):
        seen = min(tokens, WINDOW * 8)
        expected = CURVE.seconds(Work(8, 8, tokens, window=WINDOW, window_decode_keys=seen))
        assert costs.decode_seconds(8, tokens) == pytest.approx(expected, rel=1e-12)


def test_a_batch_that_is_advanced_has_the_work_of_its_later_tokens() -> None:
    sequences: list[Any] = [None] * 4
    chunks = [Chunk(each, 0, start, 1, True, True) for each, start in zip(sequences, (3, 290, 299, 5000), strict=True)]
    batch = Batch(0, chunks, work=Work.of([chunk[2:5] for chunk in chunks], WINDOW))
    for times in (1, 7, 400):
        batch.advance(times, 1, 1.0)
        assert batch.work == Work.of([chunk[2:5] for chunk in batch.chunks], WINDOW)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "plan",
    [ParallelPlan(), ParallelPlan(stage=2), ParallelPlan(context=2), ParallelPlan(1, 2, 1, placement="interleave")],
    ids=str,
)
@pytest.mark.parametrize("running", [1, 16])
def test_memory_is_as_by_the_engines_account(name: str, plan: ParallelPlan, running: int) -> None:
    model, pages, length = MODELS[name], 40 * running, 8192
    config = EngineConfig(page_size=64, num_pages=pages, max_running=running, max_length=length, token_budget=512)
    mesh = make_mesh(stage=plan.stage, context=plan.context, tensor=plan.tensor)
    account = estimate(Llama(model), config, mesh, jnp.bfloat16, pages, length, plan=plan)
    tokens = pages * 64 * plan.context
    found = device_memory(model, plan, H100.device, tokens, 512, config=config)
    assert found.cache == account.pages // plan.num_devices  # on CPUs, of all devices together
    windows = config.count_window_pages(model.sliding_window, plan, pages, length)
    alike = device_memory(without_windows(model), plan, H100.device, tokens, 512)
    assert (found.cache < alike.cache) == (0 < windows < pages)


@pytest.mark.parametrize("name", MODELS)
def test_as_many_tokens_fit_as_their_pages_and_window_pages_do(name: str) -> None:
    model, plan = MODELS[name], ParallelPlan(context=2)
    config = EngineConfig(page_size=64, max_running=200, max_length=100_000, token_budget=512)
    most = max_tokens(model, plan, H100.device, 512, config=config)
    assert device_memory(model, plan, H100.device, most, 512, config=config).fits
    more = most + plan.context * (1 if model.sliding_window is None else config.page_size)
    is_all = model.sliding_window is not None and most == config.most_pages(100_000) * 64 * 2
    assert is_all == (name == "gemma") or name == "mistral"
    assert device_memory(model, plan, H100.device, more, 512, config=config).fits == is_all


def test_pages_within_a_room_are_those_that_take_it() -> None:
    for page, window, most in itertools.product((0, 3, 7), (0, 5), (0, 4)):
        sizes = PageBytes(page, window)
        if not sum(sizes):
            continue
        for room in range(60):
            count = sizes.pages_within(room, most)
            assert sizes.of_pages(count, most) <= room
            assert count > 1 << 30 or sizes.of_pages(count + 1, most) > room


def test_a_plan_counts_windows_in_time_and_in_memory() -> None:
    goal = Goal(context=500_000, ttft=60, tpot=0.05)
    found = evaluate(MISTRAL, H100, 1, goal, ParallelPlan(), "adaptive", 2048)
    assert isinstance(found, Planned)
    refused = evaluate(without_windows(MISTRAL), H100, 1, goal, ParallelPlan(), "adaptive", 2048)
    assert isinstance(refused, RejectedPlan)
    assert refused.reason == "memory"
    # A token of the prompt takes as long at its end as where the first window is full.
    near = evaluate(MISTRAL, H100, 1, dataclasses.replace(goal, context=50_000), ParallelPlan(), "adaptive", 2048)
    assert isinstance(near, Planned)
    assert found.prompt.ttft == pytest.approx(10 * near.prompt.ttft, rel=0.02)
    assert found.prompt.tpot == pytest.approx(near.prompt.tpot, rel=0.001)
    simulated = simulate_prompt(near.deployment, 50_000, 64, steps=30)
    assert simulated.ttft == pytest.approx(near.prompt.ttft, rel=0.05)


def test_pages_of_tiers_have_all_layers_however_long_they_are() -> None:
    """A page of 1,024 tokens has more of them than a window of 512."""
    config = EngineConfig(page_size=1024, num_pages=10, tiers=TierConfig(host_bytes=1 << 30))
    instances = (
        ClusterInstance("one", "both", model, config, predictor(GEMMA, H100))
        for model in (GEMMA, without_windows(GEMMA))
    )
    assert len({instance.host_pages for instance in instances}) == 1
