"""FP8 pages in engines: every plan gives the tokens of dense attention to keys and values in FP8, but for rounding.

That they are the same to the last bit where the same keys come in, `test_row_exchanges` says.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from abstract_step import CONFIG, NUM_PAGES, PAGE_SIZE, compile_step, make_shape
from dense_oracle import make_engine
from hlo import IN_PLACE, collectives, opcodes_of_size
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_workload import ALL, STRATEGIES, UNEVEN, check_tokens, make_mesh_engine, oracle_of, run_workload
from workload import Workload

from longctx.models.footprint import cache_bytes
from longctx.models.validation import FP8_KV as FP8
from longctx.parallel import make_mesh
from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.engine.memory import default_pages


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "strategy"), ALL, ids=str)
def test_tokens_on_every_mesh_are_near_those_of_one_device(
    sizes: tuple[int, int, int], strategy: tuple[str, str]
) -> None:
    check_tokens(sizes, strategy, kv_dtype=FP8)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "strategy"), UNEVEN, ids=str)
def test_tokens_with_uneven_stages_are_near_those_of_one_device(
    sizes: tuple[int, int, int], strategy: tuple[str, str]
) -> None:
    check_tokens(sizes, strategy, layers=5, kv_dtype=FP8)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@settings(max_examples=2)
@given(
    seed=st.integers(0, 2**20),
    run_ahead=st.integers(1, 4),
    admission=st.sampled_from(["reserve", "optimistic"]),
    page_size=st.sampled_from([4, 8, 16]),
    rank_tokens=st.sampled_from([8, 16, 40]),
)
def test_random_workloads_on_all_three_axes(
    strategy: tuple[str, str], seed: int, run_ahead: int, admission: str, page_size: int, rank_tokens: int
) -> None:
    plan = ParallelPlan(2, 2, 2, exchange=strategy[1], placement=strategy[0], rank_tokens=rank_tokens)  # type: ignore[arg-type]
    options = {"run_ahead": run_ahead, "admission": admission, "page_size": page_size, "num_pages": 192 // page_size}
    engine = make_mesh_engine(plan, kv_dtype=FP8, **options)
    run_workload(engine, seed, 30)


def test_with_chunks_prefix_hits_and_preemption_tokens_are_near() -> None:
    """A scale is of one token's row, so a key does not depend on the chunk that it is computed in."""
    oracle, shapes = oracle_of(1, 1, FP8), {"admission": "optimistic", "kv_dtype": FP8}
    for budget, num_pages, events in ((8, 24, 30), (32, 11, 60)):
        engine = make_engine(None, oracle, token_budget=budget, buckets=(budget,), num_pages=num_pages, **shapes)
        assert engine.executor.runner.state.cache.is_fp8  # type: ignore[attr-defined]
        Workload(engine, 1, oracle.expected_tokens, oracle.follows).run(events)
        assert num_pages > 11 or engine.stats().preemptions


@pytest.mark.usefixtures("users_fusions")
@pytest.mark.parametrize(
    ("dtype", "layered"), [(jnp.float32, True), pytest.param(jnp.bfloat16, False, marks=pytest.mark.slow)]
)
def test_the_step_updates_pages_and_scales_in_place(dtype: object, layered: bool) -> None:
    compiled = compile_step(make_mesh(), make_shape(make_mesh()), dtype, layered=layered, kv_dtype=FP8)
    program = compiled.layer if layered else compiled
    check_in_place(program)
    assert not collectives(program.as_text(), 1)


@pytest.mark.slow
@pytest.mark.usefixtures("users_fusions")
@pytest.mark.parametrize(
    ("exchange", "message", "rounds"),
    [("pass_kv", 2, 8), ("pass_q", 0, 1), ("all_gather", 2, 8)],
)
def test_every_exchange_updates_pages_in_place_and_sends_packed_rows(exchange: str, message: int, rounds: int) -> None:
    mesh = make_mesh(context=2)
    shape = make_shape(mesh, (16, 8, 8), exchange=exchange, message=message, rounds=rounds)
    program = compile_step(mesh, shape, jnp.float32, layered=True, kv_dtype=FP8).layer
    check_in_place(program)
    rows = 2 * CONFIG.num_kv_heads * (CONFIG.head_dim + 4)  # bytes of a token's key and value
    block = {"pass_kv": 16 + message * PAGE_SIZE, "pass_q": 16, "all_gather": 16}[exchange] * rows
    assert block in [x.sent for x in collectives(program.as_text(), 2)]


def check_in_place(program: Any) -> None:
    memory, layer = program.memory_analysis(), NUM_PAGES * PAGE_SIZE * CONFIG.num_kv_heads * CONFIG.head_dim
    assert memory.alias_size_in_bytes >= cache_bytes(CONFIG, NUM_PAGES * PAGE_SIZE, kv_dtype=FP8)
    assert memory.temp_size_in_bytes < layer / 4
    assert opcodes_of_size(program.as_text(), layer) <= IN_PLACE


def test_as_many_pages_fit_as_their_bytes_say() -> None:
    """In float32 with heads of 8: 32 bytes a row, 12 in FP8; of 128 in bfloat16 it would be 256 and 132."""
    configs = [EngineConfig(page_size=8, max_running=10**5, token_budget=10**5, kv_dtype=x) for x in (None, FP8)]
    exact, fp8 = (default_pages(oracle_of(1, 1).model, x, make_mesh(), jnp.float32, 256) for x in configs)
    assert fp8 == exact * 32 // 12


@pytest.mark.parametrize("wrong", ["fp8", "float8_e5m2", "bfloat16", jnp.float8_e4m3fn, 8, np.zeros(2)])
def test_other_dtypes_are_refused(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match="kv_dtype must be None"):
        EngineConfig(kv_dtype=wrong)  # type: ignore[arg-type]
