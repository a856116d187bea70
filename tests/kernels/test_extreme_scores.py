"""Scores of any finite size: weights near 0 and 1, scores below -1e30, rows that see nothing, and no NaN."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.kernels import attention, paged_attention
from longctx.kernels.triton import adapter

LENGTH, HEADS, KV_HEADS, SIZE, PAGE = 40, 4, 2, 16, 8
SCALE = 1e6 / 3  # no power of two, so that scores are rounded
# Tests compile without LLVM's passes, and so without contracted instructions, which users have.
OPTIONS = {"xla_backend_optimization_level": 3}


def draw(seed: int, exponent: int, sign: int) -> tuple[np.ndarray, ...]:
    """q, k, v and d_out as small integers times a power of two, and segments.

    The scores of a row are integers times 32 and less, so that float32 keeps their order: below 3000 * SCALE * 2 **
    exponent, of the given sign.
    """
    rng = np.random.default_rng(seed)
    q, d_out = rng.integers(-1, 2, (2, LENGTH, HEADS, SIZE))
    k, v = rng.integers(-1, 2, (2, LENGTH, KV_HEADS, SIZE))
    q[..., 0], k[..., 0] = 64 * sign, 1 + rng.permutation(LENGTH)[:, None]
    segments = np.sort(rng.integers(-1, 2, LENGTH))
    return (np.ldexp(q, exponent), *(x.astype(float) for x in (k, v, d_out)), segments)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, seen: np.ndarray) -> dict[str, Any]:
    """Values, and gradients of sum(d_out * out), those of q and k divided by SCALE, in float64 NumPy."""
    group = HEADS // KV_HEADS
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.where(seen, np.einsum("tnh,snh->nts", q, k) * SCALE, -np.inf)
    peak = np.where(seen.any(-1), scores.max(-1), 0)
    weights = np.exp(scores - peak[..., None])
    total = weights.sum(-1)
    weights /= np.where(total > 0, total, 1)[..., None]
    out = np.einsum("nts,snh->tnh", weights, v)
    d_weights = np.einsum("tnh,snh->nts", d_out, v) - np.einsum("tnh,tnh->nt", d_out, out)[..., None]
    d_k, d_v = np.einsum("nts,tnh->snh", weights * d_weights, q), np.einsum("nts,tnh->snh", weights, d_out)
    with np.errstate(divide="ignore"):
        lse = (peak + np.log(total)).T
    return {
        "out": out,
        "lse": lse,
        "d_q": np.einsum("nts,snh->tnh", weights * d_weights, k),
        **{name: x.reshape(LENGTH, KV_HEADS, group, SIZE).sum(2) for name, x in (("d_k", d_k), ("d_v", d_v))},
    }


@functools.partial(jax.jit, static_argnames="implementation", compiler_options=OPTIONS)
def run(q: Any, k: Any, v: Any, d_out: Any, segments: Any, implementation: str) -> dict[str, Any]:
    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(
            q, k, v, q_segment_ids=segments, kv_segment_ids=segments, scale=SCALE, implementation=implementation
        )

    (out, lse), vjp = jax.vjp(forward, q, k, v)
    d_q, d_k, d_v = vjp((d_out, jnp.zeros_like(lse)))
    return {"out": out, "lse": lse, "d_q": d_q / SCALE, "d_k": d_k / SCALE, "d_v": d_v}


@functools.partial(jax.jit, static_argnames="implementation", compiler_options=OPTIONS)
def run_paged(q: Any, k: Any, v: Any, sequence: Any, implementation: str) -> dict[str, Any]:
    k_pages, v_pages = (x.reshape(-1, PAGE, KV_HEADS, SIZE) for x in (k, v))
    table, lengths = jnp.arange(LENGTH // PAGE)[None], jnp.array([LENGTH])
    metadata = table, None, lengths, jnp.arange(LENGTH), sequence
    out, lse = paged_attention(q, k_pages, v_pages, *metadata, scale=SCALE, implementation=implementation)
    return {"out": out, "lse": lse}


def check(got: dict[str, Any], want: dict[str, Any], exponent: int) -> None:
    # Where weights are not all 0 and 1, scores and lse are below 100, of which float32 rounds 6e-8.
    tolerance = 1e-5 + 4e-7 * min(np.ldexp(3000 * SCALE, exponent), 100)
    for name, x in got.items():
        x, y = np.asarray(x, np.float64), want[name]
        finite = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), finite, err_msg=name)
        np.testing.assert_array_equal(x[~finite], y[~finite], err_msg=name)  # -inf
        size = {"lse": 1 + np.abs(y[finite]), "d_q": 64, "d_k": np.ldexp(64.0, exponent)}.get(name, 1)
        assert (np.abs(x[finite] - y[finite]) / size).max(initial=0) < tolerance, name


CAUSAL = np.tri(LENGTH, dtype=bool)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("implementation", ["xla", "reference", pytest.param("triton", marks=pytest.mark.slow)])
@given(st.integers(0, 99), st.integers(-26, 90), st.sampled_from([-1, 1]))
@example(0, 2, 1)  # 1e9, where scores are rounded to multiples of 64
@example(0, 90, -1)  # all scores are below -1e30
@example(0, -26, 1)  # all weights are between 0 and 1
@settings(max_examples=5)
def test_any_finite_scores(paged: bool, implementation: str, seed: int, exponent: int, sign: int) -> None:
    *arrays, segments = draw(seed, exponent, sign)
    q, k, v, d_out = (jnp.asarray(x, jnp.float32) for x in arrays)
    real = segments >= 0
    if paged and implementation == "triton":
        return
    if paged:
        got = run_paged(q, k, v, jnp.where(real, 0, -1), implementation)
        want = dense(*arrays, CAUSAL & real[:, None])
    else:
        with adapter.interpreted():
            got = run(q, k, v, d_out, jnp.asarray(segments), implementation)
        want = dense(*arrays, CAUSAL & (segments[:, None] == segments) & real)
    check(got, want, exponent)


def test_float64_has_the_range_of_float64() -> None:
    with jax.enable_x64(True):
        q, k, v, d_out, segments = draw(0, 900, -1)
        got = run(q, k, v, d_out, segments, "xla")
        want = dense(q, k, v, d_out, CAUSAL & (segments[:, None] == segments) & (segments >= 0))
    for name in ("out", "lse", "d_v"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, atol=1e-12, err_msg=name)
