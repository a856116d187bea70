"""Values, state and gradients of `attention` against the float64 oracle, on drawn cases."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.kernels import attention

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class Case(NamedTuple):
    """One problem: float64 arrays, positions and segments, and cotangents for both results."""

    arrays: dict[str, np.ndarray]
    masks: dict[str, np.ndarray]
    causal: bool
    d_out: np.ndarray
    d_lse: np.ndarray


# (batch, T, S, K, G, H): each compiles once, and everything else about a case is data. Lengths that divide nothing,
# shorter than a block, just over one, several.
SHAPES = [
    ((), 1, 1, 1, 1, 1),
    ((), 1, 3000, 2, 4, 8),
    ((2,), 7, 300, 3, 1, 24),
    ((), 700, 700, 1, 8, 8),
    ((2, 1), 257, 1100, 2, 4, 8),
    ((), 1100, 257, 1, 2, 16),
]
ANY_SHAPE = st.tuples(
    st.sampled_from([(), (1,), (2,), (2, 1), (3, 2)]),
    st.integers(1, 1300),
    st.integers(1, 1300),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 40),
)


@st.composite
def cases(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[tuple[int, ...], int, int, int, int, int]]) -> Case:
    """Every way in which tokens may be laid out, for drawn shapes."""
    batch, q_length, kv_length, kv_heads, group, head_size = draw(shapes)
    layout = draw(st.sampled_from(["suffix", "zigzag", "striped", "packed", "shuffled", "before"]))
    padding = draw(st.sampled_from(["none", "some", "all"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    shape_q, shape_kv = (
        (*batch, q_length, kv_heads * group, head_size),
        (*batch, kv_length, kv_heads, head_size),
    )
    arrays = {name: rng.standard_normal(s) for name, s in (("q", shape_q), ("k", shape_kv), ("v", shape_kv))}
    return Case(
        arrays=arrays,
        masks=_masks(rng, layout, padding, batch, q_length, kv_length),
        causal=draw(st.booleans()),
        d_out=rng.standard_normal(shape_q),
        d_lse=rng.standard_normal(shape_q[:-1]),
    )


def _masks(
    rng: np.random.Generator, layout: str, padding: str, batch: tuple[int, ...], q_length: int, kv_length: int
) -> dict[str, np.ndarray]:
    q_segments, kv_segments = np.zeros(q_length, int), np.zeros(kv_length, int)
    q_positions, kv_positions = np.arange(q_length), np.arange(kv_length)
    match layout:
        case "suffix":  # new tokens after a cached prefix
            q_positions = q_positions + max(0, kv_length - q_length)
        case "zigzag":  # two chunks of a sequence four times as long
            q_positions = np.where(q_positions < q_length // 2, q_positions, q_positions + 2 * q_length)
        case "striped":
            q_positions, kv_positions = 4 * q_positions + 1, 4 * kv_positions + 3
        case "packed":  # several sequences, each counting from zero
            q_segments, q_positions = _pack(rng, q_length)
            kv_segments, kv_positions = _pack(rng, kv_length)
        case "shuffled":  # no order at all, and per sequence of the batch
            q_positions = rng.integers(0, 1000, (*batch, q_length))
            kv_positions = rng.integers(0, 1000, (*batch, kv_length))
            q_segments = rng.integers(0, 3, (*batch, q_length))
            kv_segments = rng.integers(0, 3, kv_length)
        case "before":  # every query stands before every key
            kv_positions = kv_positions + q_length
    if padding == "some":
        q_segments = np.where(rng.random(q_length) < 0.2, -1, q_segments)
        kv_segments = np.where(np.arange(kv_length) >= kv_length - kv_length // 3, -1, kv_segments)
    elif padding == "all":
        kv_segments = np.full(kv_length, -1)
    return {
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "q_segment_ids": q_segments,
        "kv_segment_ids": kv_segments,
    }


def _pack(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    cuts = np.sort(rng.integers(0, length + 1, 3))
    segments = np.searchsorted(cuts, np.arange(length), side="right")
    starts = np.concatenate([[0], cuts])[segments]
    return segments, np.arange(length) - starts


@functools.partial(jax.jit, static_argnames=("causal", "implementation"))
def _values_and_gradients(
    arrays: dict[str, jax.Array],
    masks: dict[str, jax.Array],
    d_out: jax.Array,
    d_lse: jax.Array,
    causal: bool,
    implementation: str,
) -> dict[str, jax.Array]:
    def weighted(arrays: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        out, lse = attention(**arrays, **masks, causal=causal, implementation=implementation, out_dtype=d_out.dtype)
        seen = jnp.where(lse == -jnp.inf, 0, lse)  # an empty row's -inf would swallow the sum
        return jnp.sum(out * d_out) + jnp.sum(seen * d_lse), {"out": out, "lse": lse}

    grads, results = jax.grad(weighted, has_aux=True)(arrays)
    return results | {f"d{name}": grad for name, grad in grads.items()}


def run(case: Case, dtype: object, implementation: str) -> dict[str, np.ndarray]:
    """Values and gradients as float64; computed in `dtype`, results asked for in float32 or wider."""
    wide = jnp.promote_types(dtype, jnp.float32)
    results = _values_and_gradients(
        {name: jnp.asarray(x, dtype) for name, x in case.arrays.items()},
        {name: jnp.asarray(x, jnp.int32) for name, x in case.masks.items()},
        jnp.asarray(case.d_out, wide),
        jnp.asarray(case.d_lse, wide),
        case.causal,
        implementation,
    )
    return {name: np.asarray(x, np.float64) for name, x in results.items()}


def oracle(case: Case) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        return run(case, jnp.float64, "reference")


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference; infinities must stand in the same places."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    assert np.isfinite(got[finite]).all()
    return float(np.max(np.abs(got[finite] - want[finite]), initial=0.0))


@given(cases(st.sampled_from(SHAPES)))
@settings(max_examples=60)
def test_float32_agrees_with_oracle(case: Case) -> None:
    check_float32(case)


@pytest.mark.slow
@given(cases(ANY_SHAPE))
@settings(max_examples=150)
def test_float32_agrees_with_oracle_for_any_shape(case: Case) -> None:
    check_float32(case)


def check_float32(case: Case) -> None:
    want = oracle(case)
    for name, got in run(case, jnp.float32, "xla").items():
        # Gradients of keys sum over the queries: the bound is relative to their size.
        size = np.abs(want[name][np.isfinite(want[name])]).max(initial=1.0)
        assert error(got, want[name]) < 1e-5 * size, name


@given(cases(st.sampled_from(SHAPES[-2:])), st.sampled_from(["bfloat16", "float16"]))
@settings(max_examples=20)
def test_half_precision_is_as_good_as_dense(case: Case, dtype: str) -> None:
    """Within 2.5x the error of the dense computation on the same rounded inputs, plus 2e-3."""
    want = oracle(case)
    dense = run(case, DTYPES[dtype], "reference")
    for name, got in run(case, DTYPES[dtype], "xla").items():
        assert error(got, want[name]) <= 2.5 * error(dense[name], want[name]) + 2e-3, name


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float64_is_honoured(implementation: str) -> None:
    with jax.enable_x64(True):
        q, k, v = jax.random.normal(jax.random.key(0), (3, 300, 2, 8), jnp.float64)
        out, lse = attention(q, k, v, implementation=implementation)
        want, want_lse = attention(q, k, v, implementation="reference")
        assert out.dtype == lse.dtype == jnp.float64
        chex.assert_trees_all_close((out, lse), (want, want_lse), rtol=0, atol=1e-13)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(implementation: str, shape: tuple[int, int]) -> None:
    q, k = jnp.ones((shape[0], 4, 8)), jnp.ones((shape[1], 2, 8))
    out, lse = attention(q, k, k, causal=False, implementation=implementation)
    assert out.shape == (shape[0], 4, 8)
    assert lse.shape == (shape[0], 4)
    assert not out.any()
    assert bool((lse == -jnp.inf).all())


def test_out_dtype_keeps_partial_results_wide() -> None:
    q = jnp.ones((4, 2, 8), jnp.bfloat16)
    out, lse = attention(q, q, q)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    out, lse = attention(q, q, q, out_dtype=jnp.float32)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)


def test_scores_far_apart_stay_finite() -> None:
    """Scores near the float32 limits of exp: the online maximum must carry them."""
    q = jnp.full((1, 1, 1), 1.0)
    k = jnp.linspace(-3e4, 3e4, 600)[:, None, None]
    out, lse = attention(q, k, k, causal=False, scale=1.0, implementation="xla")
    assert float(lse[0, 0]) == pytest.approx(3e4, rel=1e-5)
    assert float(out[0, 0, 0]) == pytest.approx(3e4, rel=1e-5)
