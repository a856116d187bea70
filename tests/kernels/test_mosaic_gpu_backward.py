"""Gradients of the Mosaic GPU kernel in the interpreter, against the dense reference on the same rounded operands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.mosaic_gpu_backward import mosaic_gpu_backward
from longctx.kernels.attention.reference import reference_attention, reference_backward
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.mosaic_gpu import adapter

DOCUMENTS = np.r_[[0] * 30, [1] * 50, [-1] * 30]
RESTARTING = np.r_[0:30, 0:50, 0:30]

# What differs from a causal call of T = S = 100 tokens of one head of size 64. An interpreted call takes seconds.
FAST: dict[str, dict[str, Any]] = {
    "packed, with padding, from the least position on": {
        "length": 110,
        "kv_length": 110,
        "q_positions": RESTARTING - 2**31,
        "kv_positions": RESTARTING - 2**31,
        "q_segments": DOCUMENTS,
        "kv_segments": DOCUMENTS,
    },
    "first and last": {"causal": False, "q_first": np.arange(100) // 30 * 30, "q_last": np.arange(100)[::-1]},
}
SLOW: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 0)},
    "rows that see nothing": {"q_positions": np.arange(100) - 30},
    "cached prefix": {"length": 30, "kv_length": 120, "q_positions": np.arange(90, 120)},
    "several tiles": {"length": 300, "kv_length": 300},
    "packed, several tiles": {
        "length": 220,
        "kv_length": 220,
        "q_positions": np.tile(RESTARTING, 2),
        "kv_positions": np.tile(RESTARTING, 2),
        "q_segments": np.r_[DOCUMENTS, [2] * 30, [3] * 50, [-1] * 30],
        "kv_segments": np.r_[DOCUMENTS, [2] * 30, [3] * 50, [-1] * 30],
    },
    "first of each query, causal": {"length": 150, "kv_length": 150, "q_first": np.arange(150) - 40},
    "last of each query, several heads": {"causal": False, "q_last": np.maximum(np.arange(100), 50), "group": 2},
    "window of both sides": {"length": 150, "kv_length": 230, "causal": False, "window": (20, 90)},
    "not causal, ragged": {"length": 129, "kv_length": 67, "causal": False},
    "zigzag": {
        "length": 128,
        "kv_length": 128,
        "q_positions": np.r_[0:64, 192:256],
        "kv_positions": np.arange(64, 192),
    },
    "heads that share a KV head": {"length": 140, "kv_length": 140, "group": 3},
    "several KV heads": {"length": 60, "kv_length": 60, "kv_heads": 2, "group": 2},
    "head size 128": {"length": 70, "kv_length": 150, "head_size": 128, "group": 2, "causal": False},
    "head size 256": {"head_size": 256},
    "float16": {"dtype": jnp.float16},
    "keys that a batch shares": {"length": 60, "kv_length": 90, "batch": 2, "kv_batch": 1},
    "masks of each sequence": {
        "length": 40,
        "batch": 2,
        "kv_batch": 2,
        "q_positions": np.arange(40) + np.array([[60], [0]]),
        "kv_positions": np.arange(100) + np.array([[0], [0]]),
    },
    "keys and values in one array": {"length": 80, "together": True},
    "a part of the keys": {"q_positions": np.arange(30, 130), "others": 60},
    "negative scale": {"scale": -0.2},
    "scale of zero": {"scale": 0.0},
}


def check(
    length: int = 100,
    kv_length: int = 100,
    kv_heads: int = 1,
    group: int = 1,
    head_size: int = 64,
    batch: int = 1,
    kv_batch: int = 1,
    q_positions: np.ndarray | None = None,
    kv_positions: np.ndarray | None = None,
    q_segments: np.ndarray | None = None,
    kv_segments: np.ndarray | None = None,
    q_first: np.ndarray | None = None,
    q_last: np.ndarray | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    scale: float = 0.125,
    dtype: Any = jnp.bfloat16,
    together: bool = False,
    others: int = 0,
) -> None:
    """`others`: the number of last keys that count only in lse and row terms, as keys of another call."""
    numbers = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return jnp.asarray(numbers.standard_normal(shape), dtype)

    q, d_out = (draw(batch, length, kv_heads * group, head_size) for _ in range(2))
    kv = draw(2, kv_batch, kv_length, kv_heads, head_size)
    queries, keys = tokens(length, q_positions, q_segments), tokens(kv_length, kv_positions, kv_segments)
    limits = (None if x is None else jnp.asarray(np.atleast_2d(x), jnp.int32) for x in (q_first, q_last))
    queries = Tokens(*queries[:2], *limits)
    wide_q, wide_kv, d_out = (x.astype(jnp.float32) for x in (q, kv, d_out))
    rule = AttentionRule(causal, scale, window)
    out, lse = jax.jit(reference_attention, static_argnums=5)(wide_q, *wide_kv, queries, keys, rule)
    d_lse = jnp.asarray(numbers.standard_normal(lse.shape), jnp.float32)
    row_terms = jnp.where(lse == -jnp.inf, 0, d_lse - jnp.sum(d_out * out, -1))

    kv, wide_kv = (x[:, :, : kv_length - others] for x in (kv, wide_kv))
    keys = jax.tree.map(lambda x: x[:, : kv_length - others], keys)
    rest = (queries, keys, rule, lse, row_terms, d_out)
    want = [np.asarray(x) for x in jax.jit(reference_backward, static_argnums=5)(wide_q, *wide_kv, *rest)]
    with adapter.interpreted(detect_races=True):
        got = mosaic_gpu_backward(q, *((kv, kv) if together else kv), *rest)
    for name, x, expected in zip(("d_q", "d_k", "d_v"), got, want, strict=True):
        if name != "d_q" and kv_batch < batch:
            expected = expected.sum(0, keepdims=True)
        assert x.shape == expected.shape
        assert x.dtype == jnp.float32
        # Weights and gradients of scores are rounded: by half a unit in the last place.
        bound = float(jnp.finfo(dtype).eps) / 2 * np.abs(expected).max()
        np.testing.assert_allclose(x, expected, rtol=0, atol=bound, err_msg=name)
        # Of what sees nothing, and of what nobody sees, it is exactly 0.
        assert not np.any(np.asarray(x)[np.all(expected == 0, -1)])


def tokens(length: int, positions: np.ndarray | None, segments: np.ndarray | None) -> Tokens:
    positions = np.arange(length) if positions is None else positions
    segments = np.zeros_like(positions) if segments is None else segments
    return Tokens(*(jnp.asarray(np.atleast_2d(x), jnp.int32) for x in (positions, segments)))


@pytest.mark.parametrize("case", FAST)
def test_gradients_agree_with_reference(case: str) -> None:
    check(**FAST[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_gradients_agree_with_reference_in_every_case(case: str) -> None:
    check(**SLOW[case])


def test_results_are_float32_under_tracing() -> None:
    """Shapes and dtypes alone, under `jax.jit`'s tracing, as the custom VJP calls it."""
    q, kv = jnp.zeros((2, 33, 4, 64), jnp.bfloat16), jnp.zeros((2, 1, 50, 2, 64), jnp.bfloat16)
    rows = jnp.zeros((2, 33, 4))
    sides = tokens(33, None, None), tokens(50, None, None)

    def run(q: Array, kv: Array) -> tuple[Array, Array, Array]:
        return mosaic_gpu_backward(q, kv, kv, *sides, AttentionRule(True, -1.0), rows, rows, q.astype(jnp.float32))

    shapes = [(x.shape, x.dtype) for x in jax.eval_shape(run, q, kv)]
    assert shapes == [(x, jnp.float32) for x in (q.shape, kv.shape[1:], kv.shape[1:])]
