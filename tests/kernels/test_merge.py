"""Merging the states of parts gives the state of the whole, including empty states and gradients."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.kernels import attention, merge_state, merge_states

LENGTH, PARTS = 40, 3


def _inputs(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (jax.random.normal(key, (LENGTH, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    return q, k, v


@functools.partial(jax.jit, static_argnames="axis")
def _whole_and_merged(q: jax.Array, k: jax.Array, v: jax.Array, part: jax.Array, axis: int) -> list[object]:
    """Values and gradients of attention to all keys at once, and to each part's keys followed by a merge."""

    def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attention(q, k, v, implementation="reference")

    def merged(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries = jnp.zeros(LENGTH, jnp.int32)
        segments = [jnp.where(part == index, 0, -1) for index in range(PARTS)]
        states = [
            attention(q, k, v, q_segment_ids=queries, kv_segment_ids=s, implementation="reference") for s in segments
        ]
        outs, lses = zip(*states, strict=True)
        return merge_states(jnp.stack(outs, axis), jnp.stack(lses, axis), axis=axis)

    def loss(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return sum(jnp.sum(jnp.sin(x)) for x in state)

    return [(f(q, k, v), jax.grad(lambda *qkv, f=f: loss(f(*qkv)), (0, 1, 2))(q, k, v)) for f in (whole, merged)]


@settings(max_examples=6)
@given(st.integers(0, 1000), st.integers(0, 2), st.data())
def test_parts_make_the_whole(seed: int, axis: int, data: st.DataObject) -> None:
    """Keys in any parts, some of them empty, with states stacked along any axis; values and gradients."""
    parts = data.draw(st.lists(st.integers(0, data.draw(st.integers(0, PARTS - 1))), min_size=LENGTH, max_size=LENGTH))
    whole, merged = _whole_and_merged(*_inputs(seed), jnp.array(parts), axis)
    chex.assert_trees_all_close(merged, whole, atol=2e-5)


def test_pair_is_merge_states_of_two() -> None:
    q, k, v = _inputs(0)
    halves = [attention(q, k[s], v[s], causal=False) for s in (slice(0, 11), slice(11, None))]
    (out_a, lse_a), (out_b, lse_b) = halves
    chex.assert_trees_all_close(
        merge_state(out_a, lse_a, out_b, lse_b),
        attention(q, k, v, causal=False, implementation="reference"),
        atol=1e-5,
    )


def test_two_empty_states_stay_empty_without_nan() -> None:
    out, lse = jnp.zeros((3, 2, 4)), jnp.full((3, 2), -jnp.inf)
    merged = merge_state(out, lse, out, lse)
    chex.assert_trees_all_equal(merged, (out, lse))

    def total(out: jax.Array, lse: jax.Array) -> jax.Array:
        merged_out, merged_lse = merge_state(out, lse, out, lse)
        return jnp.sum(merged_out) + jnp.sum(jnp.where(merged_lse == -jnp.inf, 0, merged_lse))

    for grad in jax.jit(jax.grad(total, (0, 1)))(out, lse):
        assert not np.isnan(grad).any()


def test_an_empty_state_changes_nothing() -> None:
    q, k, v = _inputs(1)
    out, lse = attention(q, k, v)
    nothing = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    chex.assert_trees_all_equal(merge_state(out, lse, *nothing), (out, lse))
    chex.assert_trees_all_equal(merge_state(*nothing, out, lse), (out, lse))


def test_half_precision_outs_keep_their_dtype() -> None:
    out, lse = jnp.ones((2, 3, 1, 4), jnp.bfloat16), jnp.zeros((2, 3, 1))
    merged, merged_lse = merge_states(out, lse)
    assert (merged.dtype, merged_lse.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "axis", "message"),
    [
        ((2, 3, 1, 4), (2, 3), 0, "lses must have the shape of outs without its last axis"),
        ((0, 3, 1, 4), (0, 3, 1), 0, "at least one state along axis 0"),
        ((2, 3, 1, 4), (2, 3, 1), 3, "axis must index one of the 3 axes of lses"),
    ],
)
def test_merge_states_refuses(outs: tuple[int, ...], lses: tuple[int, ...], axis: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_states(jnp.zeros(outs), jnp.zeros(lses), axis=axis)


def test_merge_state_refuses_two_shapes() -> None:
    with pytest.raises(ValueError, match="out_a and out_b must have one shape"):
        merge_state(jnp.zeros((2, 1, 4)), jnp.zeros((2, 1)), jnp.zeros((3, 1, 4)), jnp.zeros((2, 1)))


@pytest.mark.parametrize(("name", "dtype"), [("out_b", jnp.int32), ("lse_a", jnp.bfloat16), ("lse_b", jnp.float16)])
def test_merge_state_refuses_types(name: str, dtype: Any) -> None:
    """Two lses would otherwise be promoted to one type, after one of them was rounded by the caller."""
    state = {"out_a": jnp.ones((1, 1, 1)), "lse_a": jnp.full((1, 1), 100.3), "out_b": jnp.zeros((1, 1, 1))}
    state["lse_b"] = state["lse_a"]
    state[name] = state[name].astype(dtype)
    with pytest.raises(TypeError, match=f"{name} must be .*, got {jnp.dtype(dtype)}"):
        merge_state(**state)


def test_merge_states_refuses_types() -> None:
    with pytest.raises(TypeError, match="outs must be floating point, got int32"):
        merge_states(jnp.zeros((2, 1, 1), int), jnp.zeros((2, 1)))
    with pytest.raises(TypeError, match="lses must be float32, got bfloat16"):
        merge_states(jnp.zeros((2, 1, 1)), jnp.zeros((2, 1), jnp.bfloat16))


@jax.jit
def _merged_and_gradients(outs: jax.Array, lses: jax.Array) -> Any:
    def loss(outs: jax.Array, lses: jax.Array) -> Any:
        out, lse = merge_states(outs, lses)
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isinf(lse), 0, lse)), (out, lse)

    return jax.grad(loss, (0, 1), has_aux=True)(outs, lses)


@given(st.integers(0, 1000), st.sampled_from([jnp.float32, jnp.bfloat16]))
@settings(max_examples=6)
def test_inf_marks_no_keys_as_minus_inf_does(seed: int, dtype: Any) -> None:
    """Values and gradients, whatever finite out comes with it."""
    rng = np.random.default_rng(seed)
    outs = jnp.asarray(rng.standard_normal((3, 6, 2, 4)), dtype)
    lses = 1000 * rng.standard_normal((3, 6, 2))
    empty = rng.random(lses.shape) < 0.5

    def results(mark: float) -> Any:
        return _merged_and_gradients(outs, jnp.asarray(np.where(empty, mark, lses), jnp.float32))

    grads, (out, lse) = results(np.inf)
    chex.assert_trees_all_equal((grads, (out, lse)), results(-np.inf))
    np.testing.assert_array_equal(lse == -np.inf, empty.all(0))
    assert not any(np.isnan(x.astype(jnp.float32)).any() for x in (*grads, out))
    assert not np.any(out[empty.all(0)])
