"""Engines on devices whose pages leave and come back: tokens are those of an engine that computes everything."""

import functools

import numpy as np
import pytest
from dense_oracle import LENGTH, Oracle, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore, split_by

from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.tiers.config import TierConfig

PLANS = [
    ParallelPlan(),
    ParallelPlan(stage=2),
    ParallelPlan(context=2, rank_tokens=16),
    ParallelPlan(2, 1, 2),
    ParallelPlan(1, 2, 4, placement="interleave", exchange="pass_kv", rank_tokens=16),
]
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
LAYOUT = PageLayout(3, 2, 8, 8, "float32")


@functools.cache
def oracle() -> Oracle:
    return Oracle(make_model(3, 8, 2, 48))


def make_engine(store: MemoryStore | None, plan: ParallelPlan, **options: object) -> Engine:
    tiers = None if store is None else TierConfig(host_bytes=1 << 20)
    sizes = {
        "page_size": 8,
        "num_pages": 24,
        "max_running": 6,
        "token_budget": 16,
        "buckets": (16,),
        "max_length": LENGTH,
    }
    config = EngineConfig(tiers=tiers, hash_key=bytes(16), **(sizes | options))  # type: ignore[arg-type]
    return Engine(oracle().model, oracle().params, config, plan=plan, store=store)


def settle(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.slow  # `test_tier_engine` has pages of one plan in another, and `test_page_transfer` every part of pages
@settings(max_examples=5)
@given(
    one=st.sampled_from(PLANS),
    other=st.sampled_from(PLANS),
    seed=st.integers(0, 2**20),
    pages=st.integers(1, 4),
    layers=st.integers(1, 3),
    heads=st.integers(1, 2),
)
def test_what_one_plan_stored_another_loads(
    one: ParallelPlan, other: ParallelPlan, seed: int, pages: int, layers: int, heads: int
) -> None:
    store, random = MemoryStore(LAYOUT, split_by(LAYOUT, pages, layers, heads)), np.random.default_rng(seed)
    document = random.integers(0, 50, 70).tolist()
    questions = [[*document, *random.integers(0, 50, n).tolist()] for n in (3, 9)]
    expected = [oracle().expected_tokens(question, SAMPLING) for question in questions]
    first = make_engine(store, one)
    assert [output.token_ids for output in first.generate([questions[0]], SAMPLING)] == expected[:1]
    settle(first)
    assert len(store.pages) == (70 + 3 + 6 - 1) // 8
    second = make_engine(store, other)
    outputs = second.generate(questions, SAMPLING)
    assert [output.token_ids for output in outputs] == expected
    # How much depends on what it takes here, against computing it.
    assert max(output.metrics.loaded_tokens for output in outputs) > 0
    assert [fetch.num_closed for fetch in store.fetches] == [1] * len(store.fetches)


def test_evicted_pages_come_back_while_others_run() -> None:
    """Far more than there are pages for, in random order; every answer is right."""
    store, random = MemoryStore(LAYOUT, split_by(LAYOUT, 2, 3, 2)), np.random.default_rng(0)
    engine = make_engine(store, ParallelPlan(2, 1, 2))
    documents = [random.integers(0, 50, 60).tolist() for _ in range(5)]
    loaded = 0
    for _ in range(3):
        prompts = [[*documents[random.integers(5)], *random.integers(0, 50, 5).tolist()] for _ in range(3)]
        outputs = engine.generate(prompts, SAMPLING)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == oracle().expected_tokens(prompt, SAMPLING)
        engine.scheduler.loads.seconds_per_page = None
        loaded += sum(output.metrics.loaded_tokens for output in outputs)
    assert loaded > 0
