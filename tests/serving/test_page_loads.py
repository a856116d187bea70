"""Pages that leave the devices and come back: decisions, on fake devices that check what each row sees."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from fake_device import VOCAB, model_with
from fake_store import FakeStore, StoringExecutor
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.kv_cache.tiers.config import TierConfig

PLANS = [
    ParallelPlan(),
    ParallelPlan(stage=3),
    ParallelPlan(context=2),
    ParallelPlan(context=3, placement="interleave"),
    ParallelPlan(stage=2, context=2),
]


def storing_engine(
    store: FakeStore | None,
    num_pages: int = 24,
    plan: ParallelPlan | None = None,
    window: int | None = None,
    **options: Any,
) -> Engine:
    options = {"max_running": 6, "token_budget": 16, "hash_key": bytes(16), "page_size": 4} | options
    config = EngineConfig(num_pages=num_pages, tiers=None if store is None else TierConfig(host_bytes=1), **options)
    executor = StoringExecutor(config, plan or ParallelPlan(), num_pages, store or FakeStore(), window)
    return Engine(model_with(window), None, config, executor=executor, clock=executor.clock, plan=plan, store=store)


def conversation(random: np.random.Generator, turns: int) -> list[list[int]]:
    """Prompts that begin alike, more or less."""
    prompts: list[list[int]] = []
    for _ in range(turns):
        before = prompts[random.integers(len(prompts))] if prompts and random.random() < 0.7 else []
        prompts.append([*before, *random.integers(0, VOCAB, random.integers(1, 14)).tolist()][:40])
    return prompts


def tokens_of(engine: Engine, prompts: list[list[int]], at_a_time: int, **sampling: Any) -> list[list[int]]:
    tokens = []
    for i in range(0, len(prompts), at_a_time):
        requests = [
            Request(p, SamplingParams(max_tokens=5, ignore_eos=True, **sampling)) for p in prompts[i : i + at_a_time]
        ]
        tokens += [output.token_ids for output in engine.generate(requests)]
    return tokens


@given(
    st.integers(0, 2**32),
    st.sampled_from(PLANS),
    st.sampled_from([0.0, 0.2]),
    st.integers(1, 5),
    st.sampled_from(["reserve", "optimistic"]),
    st.sampled_from([None, None, 1, 6, 20]),
)
@settings(max_examples=20)
def test_answers_are_the_same_whatever_is_loaded(
    seed: int, plan: ParallelPlan, loses: float, at_a_time: int, admission: str, window: int | None
) -> None:
    prompts = conversation(np.random.default_rng(seed), 9)
    # Few pages, so that most of what is found was evicted meanwhile.
    store, pages = FakeStore(loses, seed), -(-24 // plan.context)
    engine = storing_engine(store, pages, plan, window, admission=admission)
    plain = storing_engine(None, 400, plan)
    assert tokens_of(engine, prompts, at_a_time) == tokens_of(plain, prompts, at_a_time)
    assert engine.core.pool.num_held == 0
    assert not engine.scheduler.loads


def test_evicted_pages_are_loaded_again() -> None:
    store = FakeStore()
    engine = storing_engine(store, 12)
    first, other = list(range(33)), [*range(9, 49)]
    engine.generate([first], SamplingParams(max_tokens=1))
    engine.generate([other], SamplingParams(max_tokens=1))
    output = engine.generate([first], SamplingParams(max_tokens=3))[0]
    assert output.token_ids == storing_engine(None, 50).generate([first], SamplingParams(max_tokens=3))[0].token_ids
    assert output.metrics.cached_tokens == 32
    assert output.metrics.loaded_tokens > 16
    assert engine.stats().prompt_tokens == 33 + 40 + 1


def test_the_last_pages_are_stored_though_no_step_follows() -> None:
    store = FakeStore()
    engine = storing_engine(store)
    engine.generate([list(range(16))], SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(store.pages) == 6


def test_a_cancelled_load_writes_nothing_more() -> None:
    store = FakeStore()
    engine = storing_engine(store, 12)
    prompt, other = list(range(33)), [*range(9, 49)]
    engine.generate([prompt], SamplingParams(max_tokens=1))
    engine.generate([other], SamplingParams(max_tokens=1))
    store.random.randrange = lambda stop: stop - 1  # type: ignore[method-assign,misc]
    name = engine.submit(Request(prompt, SamplingParams(max_tokens=2)))
    engine.step()
    assert len(engine.scheduler.loads) == 1
    engine.cancel(name)
    assert tokens_of(engine, [other, prompt], 2) == tokens_of(storing_engine(None, 50), [other, prompt], 2)
    assert engine.core.pool.num_held == 0


def test_a_burst_of_equal_prompts_loads_once() -> None:
    store = FakeStore()
    engine = storing_engine(store, 30)
    prompt = list(range(33))
    engine.generate([prompt], SamplingParams(max_tokens=1))
    engine.core.pool.clear()
    executor: Any = engine.executor
    executor.num_loaded = 0
    outputs = engine.generate([prompt] * 4, SamplingParams(max_tokens=2))
    assert executor.num_loaded == 8
    assert {tuple(output.token_ids) for output in outputs} == {tuple(outputs[0].token_ids)}
    assert [output.metrics.cached_tokens for output in outputs] == [32] * 4


def test_a_slow_load_is_not_waited_for_where_computing_is_quicker() -> None:
    store = FakeStore()
    engine = storing_engine(store, 12)
    engine.scheduler.loads.seconds_per_page = 1e3
    prompt = list(range(33))
    engine.generate([prompt], SamplingParams(max_tokens=1))
    engine.core.pool.clear()
    output = engine.generate([prompt], SamplingParams(max_tokens=1))[0]
    assert output.metrics.loaded_tokens == 0


def test_prompt_logprobs_load_nothing() -> None:
    store = FakeStore()
    engine = storing_engine(store, 12)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for _ in range(2):
        output = engine.generate([list(range(33))], sampling)[0]
        engine.core.pool.clear()
        assert output.metrics.cached_tokens == 0


def test_tiers_need_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="prefix_cache=True"):
        EngineConfig(tiers=TierConfig(host_bytes=1), prefix_cache=False)
    with pytest.raises(ValueError, match="host_bytes"):
        TierConfig()
    with pytest.raises(ValueError, match="disk and disk_bytes"):
        TierConfig(1, 2)
    with pytest.raises(ValueError, match="eviction"):
        TierConfig(1, eviction="fifo")
    assert dataclasses.asdict(TierConfig(1, 2, "x"))["disk"] == "x"
