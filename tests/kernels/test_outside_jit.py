"""Array functions called without `jax.jit`: they compile once, take NumPy arrays, and vanish in a trace."""

import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations

from longctx.kernels import attention, merge_state, merge_states, paged_attention, plan_paged_attention
from longctx.parallel import context_parallel_attention, make_mesh

RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# Lengths that no other test has, so that nothing is compiled already.
Q, K, V = numbers(93, 4, 8), numbers(93, 2, 8), numbers(93, 2, 8)
OUT, LSE = numbers(93, 4, 8), numbers(93, 4)
PAGES = numbers(7, 16, 2, 8)
TABLE, ROWS = np.arange(6)[None], np.arange(93)


def paged(q: Any, pages: Any) -> Any:
    return paged_attention(q, pages, pages, TABLE, None, np.array([93]), ROWS, np.zeros(93, int))


def paged_plan(pages: Any) -> Any:
    return plan_paged_attention(4, pages, TABLE, None, np.array([93]), ROWS, np.zeros(93, int))


def gradient(q: Any, k: Any, v: Any) -> Any:
    return jax.grad(lambda *qkv: jnp.sum(jnp.sin(attention(*qkv)[0])), (0, 1, 2))(q, k, v)


def over_devices(q: Any, k: Any, v: Any) -> jax.Array:
    return context_parallel_attention(q, k, v, mesh=make_mesh(context=2, tensor=2), q_positions=np.arange(93))


CALLS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "attention": (attention, (Q, K, V)),
    "paged_attention": (paged, (Q, PAGES)),
    "plan_paged_attention": (paged_plan, (PAGES,)),
    "merge_state": (merge_state, (OUT, LSE, OUT, LSE + 1)),
    "merge_states": (merge_states, (np.stack([OUT, OUT]), np.stack([LSE, LSE + 1]))),
    "context_parallel_attention": (over_devices, (Q, K, V)),
    "gradient": (gradient, (Q, K, V)),
    "vmap": (jax.vmap(attention), (Q[None], K[None], V[None])),
}


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (jnp.float32, jnp.float16))]
)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_promoted_that_strict_types_refuse(name: str, dtype: Any) -> None:
    function, arrays = CALLS[name]
    states = {LSE.shape, (2, *LSE.shape)} if "merge" in name else set()
    arrays = tuple(array if array.shape in states else array.astype(dtype) for array in arrays)
    with jax.numpy_dtype_promotion("strict"):
        jax.block_until_ready(function(*arrays))


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_compiles_nothing(name: str) -> None:
    call, arrays = CALLS[name]
    first, second = ([jnp.asarray(x + change) for x in arrays] for change in (0, 1))
    jax.block_until_ready(call(*first))
    with count_compilations() as compiled:
        jax.block_until_ready(call(*second))
    assert compiled == []


@pytest.mark.parametrize("name", ["attention", "plan_paged_attention", "merge_state", "merge_states"])
def test_a_first_call_compiles_one_program(name: str) -> None:
    call, arrays = CALLS[name]
    arrays = tuple(jnp.asarray(x, jnp.float16) if x.ndim > 2 else jnp.asarray(x) for x in arrays)
    if name == "merge_states":
        arrays = (arrays[0], arrays[1].astype(jnp.float32))
    with count_compilations() as compiled:
        jax.block_until_ready(call(*arrays))
    assert len(compiled) == 1


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("gradient", "vmap", "plan_paged_attention")])
def test_numpy_arrays_are_accepted(name: str) -> None:
    call, arrays = CALLS[name]
    got, want = call(*arrays), call(*(jnp.asarray(x) for x in arrays))
    chex.assert_trees_all_equal(got, want)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(got))


def test_numpy_float64_becomes_what_jax_makes_of_it() -> None:
    arrays = [x.astype(np.float64) for x in (Q, K, V)]
    assert attention(*arrays)[0].dtype == jnp.float32
    with jax.enable_x64(True):
        assert attention(*arrays)[0].dtype == jnp.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(Q.tolist(), K, V), "q must be a jax.Array or numpy.ndarray, got list"),
        (lambda: attention(Q, K, np.full(V.shape, "x")), "v must hold numbers, got <U1"),
        (lambda: paged_attention(Q, PAGES, None, TABLE, None, [93], ROWS, ROWS), "v_pages must be a jax.Array or"),
        (lambda: merge_state(OUT, LSE, OUT.tolist(), LSE), "out_b must be a jax.Array or numpy.ndarray, got list"),
        (lambda: merge_states(np.stack([OUT]), [LSE]), "lses must be a jax.Array or numpy.ndarray, got list"),
    ],
)
def test_what_is_no_array_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("name", ["attention", "paged_attention", "merge_state", "merge_states"])
def test_a_traced_call_adds_no_program_of_its_own(name: str) -> None:
    """Its operations become part of the program that calls it."""
    call, arrays = CALLS[name]
    text = jax.jit(call).lower(*map(jnp.asarray, arrays)).as_text()
    functions = re.findall(r"func\.func \w+ @(\w+)", text)
    assert "main" in functions
    assert [x for x in functions if "attention" in x or "merge" in x] == []


def test_positions_out_of_range_are_refused_where_another_program_is_traced() -> None:
    """Concrete int64 positions, whose values are known while the caller's program is traced."""
    with jax.enable_x64(True):
        good, bad = jnp.arange(93), jnp.arange(93) + 2**31
        run = jax.jit(lambda q, positions: attention(q, K, V, q_positions=positions))
        chex.assert_trees_all_equal(run(Q, good), attention(Q, K, V, q_positions=good))
        closed = jax.jit(lambda q: attention(q, K, V, q_positions=good))
        chex.assert_trees_all_equal(closed(Q), attention(Q, K, V, q_positions=good))
        with pytest.raises(ValueError, match="q_positions must fit into int32, got values from 2147483648"):
            jax.jit(lambda q: attention(q, K, V, q_positions=bad))(Q)
        with pytest.raises(ValueError, match="q_positions must fit into int32"):
            context_parallel_attention(Q, K, V, mesh=make_mesh(context=2), q_positions=bad)


@pytest.mark.slow
def test_a_pair_of_devices_in_shard_map_without_jit() -> None:
    """Eager `shard_map`: types vary over the mesh, and the gradient of a replicated operand is summed."""
    P, mesh = jax.sharding.PartitionSpec, make_mesh(context=2)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        tokens = {"q_positions": positions, "kv_positions": jnp.arange(92)}
        return attention(q, k, v, **tokens, implementation="reference")[0]

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P("context"), P(), P(), P("context")), out_specs=P("context"), check_vma=True
    )

    def loss(f: Callable[..., jax.Array], *qkv: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(f(*qkv, jnp.arange(92))))

    arrays = [jnp.asarray(x[:92]) for x in (Q, K, V)]
    got, want = (jax.grad(functools.partial(loss, f), (0, 1, 2))(*arrays) for f in (sharded, local))
    chex.assert_trees_all_close(got, want, atol=1e-5)
