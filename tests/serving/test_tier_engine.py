"""Engines on devices with host memory and disk behind them: answers are those of an engine that computes everything."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from dense_oracle import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from near_outputs import LOGPROBS, check_near
from tiered_engines import (
    EXACT,
    ONE,
    PAGE_SIZE,
    PLANS,
    RANKS,
    STAGES,
    answer,
    conversation,
    expected,
    make_engine,
    on_disk,
    page_bits,
    store_of,
)

from longctx.models.validation import FP8_KV
from longctx.serving import Output, ParallelPlan, Request, SamplingParams

NEAR = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=LOGPROBS)
DOCUMENT = np.random.default_rng(1).integers(0, VOCAB, 83).tolist()


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def random_requests(random: np.random.Generator, prompts: list[list[int]]) -> list[Request]:
    requests = []
    for number, prompt in enumerate(prompts):
        n = int(random.choice([1, 1, 3]))
        sampling = SamplingParams(
            max_tokens=int(random.integers(1, 9)),
            temperature=1.0 if n > 1 or random.random() < 0.3 else 0.0,
            seed=number,
            n=n,
            repetition_penalty=float(random.choice([1.0, 1.0, 1.5])),
            logprobs=int(random.integers(3)) if random.random() < 0.3 else None,
        )
        requests.append(Request(prompt, sampling, session_id="s" if n == 1 and random.random() < 0.3 else None))
    return requests


@settings(max_examples=1)
@given(seed=st.integers(0, 2**20), plans=st.just([STAGES, RANKS]))
def test_conversations_are_the_same_over_all_tiers(seed: int, plans: list[ParallelPlan]) -> None:
    check_conversations(seed, plans)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    plans=st.lists(
        st.sampled_from(
            [*PLANS, ParallelPlan(context=2, rank_tokens=16), ParallelPlan(3, 1, 2), ParallelPlan(2, 2, 2)]
        ),
        min_size=3,
        max_size=5,
    ),
)
def test_conversations_are_the_same_over_all_tiers_of_many_plans(seed: int, plans: list[ParallelPlan]) -> None:
    check_conversations(seed, plans)


def check_conversations(seed: int, plans: list[ParallelPlan]) -> None:
    """An engine of each plan serves a part of the conversations, and leaves its pages to the next one."""
    random = np.random.default_rng(seed)
    requests = random_requests(random, conversation(random, 6 * len(plans)))
    wanted = expected(requests)
    count = sum(request.sampling.n for request in requests)
    assert len(wanted) == count
    found: list[Output] = []
    from_disk = 0
    with tempfile.TemporaryDirectory() as folder:
        for part, plan in zip(_parts(requests, 6), plans, strict=True):
            engine = make_engine(plan, on_disk(Path(folder)))
            for some in _parts(part, int(random.integers(1, 4))):
                found += answer(engine, some)
                if random.random() < 0.3:
                    engine.core.pool.clear()
            stats = store_of(engine).stats
            from_disk += stats.disk.bytes_read
            assert stats.host.corrupt == stats.disk.corrupt == 0
            assert engine.core.pool.num_held == 0
            store_of(engine).close()
    assert tokens(found) == tokens(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.text == other.text
        assert (one.logprobs is None) == (other.logprobs is None)
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert sum(output.metrics.loaded_tokens for output in found) > 0
    assert from_disk > 0


@pytest.mark.slow
def test_conversations_with_fp8_pages_go_on_over_all_tiers(tmp_path: Path) -> None:
    """Answers are those of one engine but for rounding: a key's last bits differ by plan, which FP8 amplifies."""
    requests = [Request(prompt, NEAR) for prompt in conversation(np.random.default_rng(0), 18)]
    found: list[Output] = []
    for part, plan in zip(_parts(requests, 6), (STAGES, RANKS, ONE), strict=True):
        engine = make_engine(plan, on_disk(tmp_path), kv_dtype=FP8_KV)
        found += answer(engine, part)
        assert store_of(engine).stats.host.corrupt == store_of(engine).stats.disk.corrupt == 0
        assert engine.core.pool.num_held == 0
        store_of(engine).close()
    check_near(found, expected(requests, FP8_KV))
    assert sum(output.metrics.loaded_tokens for output in found) > 0


@pytest.mark.parametrize("kv_dtype", [None, FP8_KV])
def test_pages_come_back_bit_by_bit(tmp_path: Path, kv_dtype: str | None) -> None:
    """From files that another plan has written."""
    first, second = (Request([*DOCUMENT, token], EXACT) for token in range(2))
    full, pages = len(DOCUMENT) // PAGE_SIZE * PAGE_SIZE, []
    for plan, request in ((STAGES, first), (RANKS, second)):
        engine = make_engine(plan, on_disk(tmp_path), kv_dtype=kv_dtype)
        (output,) = answer(engine, [request])
        assert output.metrics.loaded_tokens == (full if plan is RANKS else 0)
        pages.append(page_bits(engine, engine.prepare(request).keys[: full // PAGE_SIZE]))
        store_of(engine).close()
    assert pages[0].any()
    np.testing.assert_array_equal(*pages)


def test_pages_of_another_kv_dtype_are_never_loaded(tmp_path: Path) -> None:
    """Engines of both write into one folder, under the same keys; each finds its own."""
    request = Request(DOCUMENT, NEAR)
    for is_first in (True, False):
        for kv_dtype in (None, FP8_KV):
            engine = make_engine(ONE, on_disk(tmp_path), kv_dtype=kv_dtype)
            (output,) = answer(engine, [request])
            assert (output.metrics.loaded_tokens > 0) == (not is_first)
            check_near([output], expected([request], kv_dtype))
            assert store_of(engine).stats.host.corrupt == 0
            store_of(engine).close()


def _parts(requests: list[Request], size: int) -> list[list[Request]]:
    return [requests[i : i + size] for i in range(0, len(requests), size)]


def test_hits_come_from_the_tier_that_has_them(tmp_path: Path) -> None:
    """The device first, then host memory, then files, which another plan has written before a restart."""
    first, second, third, fourth = (Request([*DOCUMENT, token], EXACT) for token in range(4))
    wanted = tokens(expected([first, second, third, fourth]))
    full = len(DOCUMENT) // PAGE_SIZE * PAGE_SIZE

    engine = make_engine(STAGES, on_disk(tmp_path))
    store = store_of(engine)
    (read,) = answer(engine, [first])
    (device,) = answer(engine, [second])
    assert (device.metrics.cached_tokens, device.metrics.loaded_tokens) == (full, 0)
    assert store.stats.host.hits == 0
    engine.core.pool.clear()
    (host,) = answer(engine, [third])
    assert (host.metrics.cached_tokens, host.metrics.loaded_tokens) == (full, full)
    assert (store.stats.host.hits, store.stats.disk.bytes_read) == (full // PAGE_SIZE, 0)
    store.close()

    engine = make_engine(RANKS, on_disk(tmp_path))
    store = store_of(engine)
    assert (store.stats.host.pages, store.stats.disk.pages) == (0, full // PAGE_SIZE + 3)  # one after each question
    assert store.tier_of(engine.prepare(fourth).keys[0]) == "disk"
    (disk,) = answer(engine, [fourth])
    assert (disk.metrics.cached_tokens, disk.metrics.loaded_tokens) == (full, full)
    assert store.stats.disk.bytes_read == full // PAGE_SIZE * store.layout.page_bytes
    store.close()
    assert tokens([read, device, host, disk]) == wanted
