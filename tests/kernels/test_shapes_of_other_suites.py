"""Shapes, page layouts, masks and tolerances that other projects test their kernels with, against dense float64 NumPy.

The merges are vLLM's and flashinfer's, the shared prefixes vLLM's cascade attention, the ragged batches those of JAX's
ragged paged attention, and the masks tokamax's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.kernels import attention, merge_state, merge_states, paged_attention


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def dense(q: Any, k: Any, v: Any, seen: np.ndarray | bool = True) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) for `[*B, T, N, H]`, where each query sees some key: seen `[*B, T, S]`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[-2] // k.shape[-2]
    k, v = np.repeat(k, group, -2), np.repeat(v, group, -2)
    scores = np.einsum("...tnh,...snh->...tns", q, k, optimize=True) * q.shape[-1] ** -0.5
    scores = np.where(np.expand_dims(seen, -2) if np.ndim(seen) else seen, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("...tns,...snh->...tnh", weights / total, v, optimize=True), (peak + np.log(total))[..., 0]


def assert_close(got: Any, want: Any, atol: float, rtol: float = 0.0) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), atol=atol, rtol=rtol)


# Merges: rows that one of the two sides has no keys for are marked by -inf, or by inf as FlashAttention 2 does.


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "heads", "size", "mark"),
    [
        (256, 4, 32, -np.inf),
        (256, 4, 32, np.inf),
        slow(256, 48, 96, -np.inf),
        slow(256, 64, 48, -np.inf),
        (613, 4, 32, -np.inf),
        slow(613, 48, 96, -np.inf),
        slow(613, 64, 48, -np.inf),
        slow(1536, 4, 32, -np.inf),
        slow(1536, 48, 96, -np.inf),
    ],
)
def test_merge_of_two(rows: int, heads: int, size: int, mark: float, dtype: str) -> None:
    rng = np.random.default_rng(0)
    outs = [jnp.asarray(rng.standard_normal((rows, heads, size)), dtype) for _ in range(2)]
    lses = rng.standard_normal((2, rows, heads)).astype(np.float32)
    side = rng.integers(0, 10, (rows, heads))  # 0 and 1: that side has no keys
    marked = [np.where(side == n, np.float32(mark), lse) for n, lse in enumerate(lses)]
    out, lse = merge_state(outs[0], marked[0], outs[1], marked[1])
    weights = np.stack([np.where(side == n, 0, np.exp(lse.astype(np.float64))) for n, lse in enumerate(lses)])
    total = weights.sum(0)
    want = sum(np.asarray(x, np.float64) * (w / total)[..., None] for x, w in zip(outs, weights, strict=True))
    assert_close(out, want, 1e-3, 1e-2 if dtype == "bfloat16" else 1e-3)
    assert_close(lse, np.log(total), 1e-3, 1e-3)


def test_merge_of_a_hundred() -> None:
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((100, 256, 8, 128)).astype(np.float16)
    lses = rng.standard_normal((100, 256, 8)).astype(np.float32)
    out, lse = merge_states(outs, lses)
    weights = np.exp(lses.astype(np.float64))
    assert_close(out, np.einsum("mtn,mtnh->tnh", weights / weights.sum(0), outs.astype(np.float64)), 1e-2, 1e-5)
    assert_close(lse, np.log(weights.sum(0)), 1e-2, 1e-5)


# Pages: sequences are (rows, length), whose rows are their last tokens.


def metadata(sequences: list[tuple[int, int]], num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, and positions and sequences of the rows, the rest of which is padding."""
    positions = np.concatenate([np.arange(length - rows, length) for rows, length in sequences])
    of_rows = np.repeat(np.arange(len(sequences)), [rows for rows, _ in sequences])
    padding = (0, num_rows - len(positions))
    lengths = np.array([length for _, length in sequences])
    return lengths, np.pad(positions, padding), np.pad(of_rows, padding, constant_values=-1)


def dense_rows(q: Any, k_pages: Any, v_pages: Any, table: np.ndarray, sequences: list[tuple[int, int]]) -> Any:
    """(out, lse) of all rows but padding, of one sequence after the other."""
    results, first = [], 0
    q, k_pages, v_pages = (np.asarray(x, np.float32) for x in (q, k_pages, v_pages))
    for pages, (rows, length) in zip(table, sequences, strict=False):
        used = pages[: -(-length // k_pages.shape[1])]
        k, v = (x[used].reshape(-1, *x.shape[2:])[:length] for x in (k_pages, v_pages))
        results.append(dense(q[first : first + rows], k, v, np.tri(rows, length, length - rows, dtype=bool)))
        first += rows
    return [np.concatenate(x) for x in zip(*results, strict=True)]


@pytest.mark.parametrize(
    ("sequences", "shared", "heads", "size", "dtype"),
    [
        slow([(129, 871), (18, 280), (37, 988), (1023, 2304), (1, 257)], 256, (8, 2), 128, "float16"),
        slow([(1, 1023), (1, 879), (1, 778), (1, 1777)] * 25, 512, (16, 2), 192, "bfloat16"),
        ([(12, 87), (3, 40), (1, 33)], 32, (8, 2), 64, "float16"),
    ],
    ids=["chunks", "decodes", "few"],
)
def test_shared_prefix_and_rest_merge(
    sequences: list[tuple[int, int]], shared: int, heads: tuple[int, int], size: int, dtype: str
) -> None:
    """Pages of 16 in any order, some of them in several places; the first ones are those of all sequences."""
    rng, page_size, num_pages = np.random.default_rng(0), 16, 2048 if len(sequences) > 3 else 64
    lengths, positions, of_rows = metadata(sequences, sum(rows for rows, _ in sequences))
    pages = [jnp.asarray(rng.standard_normal((num_pages, page_size, heads[1], size)), dtype) for _ in range(2)]
    table = rng.integers(0, num_pages, (len(sequences), -(-lengths.max() // page_size)))
    num_shared = shared // page_size
    table[:, :num_shared] = table[0, :num_shared]
    q = jnp.asarray(rng.standard_normal((len(positions), heads[0], size)), dtype)
    want, want_lse = dense_rows(q, *pages, table, sequences)
    rows = lengths, positions, of_rows
    prefix = [x[table[0, :num_shared]].reshape(shared, heads[1], size) for x in pages]
    index = np.broadcast_to(np.arange(table.shape[1]), table.shape)[:, num_shared:]
    merged = merge_state(
        *attention(q, *prefix, causal=False, out_dtype=jnp.float32),
        *paged_attention(q, *pages, table[:, num_shared:], index, *rows, out_dtype=jnp.float32),
    )
    for out, lse in (paged_attention(q, *pages, table, None, *rows), merged):
        assert_close(out, want, 1e-2, 1e-2)
        assert_close(lse, want_lse, 1e-3, 1e-4)


COMPLEX = [(72, 108), (13, 40), (98, 123), (41, 41), (5, 52)]
LENGTHS = 18, 129, 597, 122, 64, 322, 463, 181, 1107, 123, 31, 18, 1229, 229, 87, 1328
ROWS = 5, 1, 120, 1, 1, 32, 251, 1, 1, 99, 1, 5, 3, 117, 1, 1


@pytest.mark.parametrize(
    ("sequences", "heads", "dtype"),
    [
        slow([(192, 328), (128, 180), (64, 255)], (32, 8), "float32"),
        slow([(192, 328), (128, 180), (64, 255)], (32, 8), "bfloat16"),
        slow([(1, length) for length in LENGTHS], (32, 8), "float32"),
        slow(list(zip(ROWS, LENGTHS, strict=True)), (32, 8), "bfloat16"),
        *(slow(COMPLEX, heads, "float32") for heads in ((32, 16), (16, 2), (4, 4), (8, 1))),
        (COMPLEX, (12, 2), "float32"),
    ],
)
def test_ragged_batches_with_unwritten_pages(
    sequences: list[tuple[int, int]], heads: tuple[int, int], dtype: str
) -> None:
    """Pages of 16, heads of 128; unwritten slots hold NaN, unused entries are no page, and rows are padded to 512."""
    rng, page_size, size = np.random.default_rng(1234), 16, 128
    num_rows = max(512, sum(rows for rows, _ in sequences))
    lengths, positions, of_rows = metadata(sequences, num_rows)
    used = -(-lengths // page_size)
    table = np.full((max(8, len(sequences)), used.max()), 10**6)
    pages = np.full((2, 1000, page_size, heads[1], size), np.nan, np.float32)
    for sequence, (length, first) in enumerate(zip(lengths, np.cumsum(used) - used, strict=True)):
        table[sequence, : used[sequence]] = np.arange(first, first + used[sequence])
        pages.reshape(2, -1, heads[1], size)[:, first * page_size :][:, :length] = rng.standard_normal(
            (2, length, heads[1], size)
        )
    q, k_pages, v_pages = (jnp.asarray(x, dtype) for x in (rng.standard_normal((num_rows, heads[0], size)), *pages))
    lengths = np.pad(lengths, (0, len(table) - len(lengths)))
    out, lse = paged_attention(q, k_pages, v_pages, table, None, lengths, positions, of_rows)
    want, want_lse = dense_rows(q, k_pages, v_pages, table, sequences)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert_close(out[: len(want)], want, tolerance, tolerance)
    assert_close(lse[: len(want)], want_lse, 1e-5, 1e-6)
    assert not out[len(want) :].any()
    assert np.isneginf(lse[len(want) :]).all()


# Contiguous keys, values and gradients.


@functools.partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(
    implementation: str, causal: bool, q: Any, k: Any, v: Any, d_out: Any, q_positions: Any, kv_positions: Any
) -> Any:
    def forward(q: Any, k: Any, v: Any) -> Any:
        masks = {"q_positions": q_positions, "kv_positions": kv_positions}
        return attention(q, k, v, **masks, causal=causal, implementation=implementation)[0]

    out, vjp = jax.vjp(forward, q, k, v)
    return out, vjp(d_out.astype(out.dtype))


def check_gradients(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: str, causal: bool, *masks: Any) -> None:
    """Within the tolerance of a dtype, and of gradients twice that; computed twice, the same to the bit."""
    atol = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 1e-2}[dtype]
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = q_shape, kv_shape, kv_shape, q_shape
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    masks = masks or tuple(np.arange(shape[-3], dtype=np.int32) for shape in (q_shape, kv_shape))
    out, gradients = values_and_gradients("xla", causal, *arrays, *masks)
    seen = masks[1][None] <= masks[0][:, None] if causal else True
    wide = [x.astype(jnp.float32) for x in arrays]
    assert_close(out, dense(*wide[:3], seen)[0], atol, max(atol / 10, 1e-6))
    _, want = values_and_gradients("reference", causal, *wide, *masks)
    for got, expected in zip(gradients, want, strict=True):
        assert_close(got, expected, max(2 * atol, 5e-6), max(atol / 5, 1e-6))
    for a, b in zip(values_and_gradients("xla", causal, *arrays, *masks)[1], gradients, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    ("q_shape", "kv_shape", "dtype", "causal"),
    [
        slow((1, 1024, 4, 64), (1, 1024, 4, 64), "float32", False),
        slow((1, 1024, 4, 64), (1, 1024, 4, 64), "bfloat16", False),
        slow((1, 1024, 4, 64), (1, 1024, 4, 64), "float16", False),
        slow((1, 1024, 4, 64), (1, 1536, 4, 64), "float32", False),
        slow((1, 1024, 4, 64), (1, 1024, 1, 64), "float32", False),
        slow((1, 512, 16, 64), (1, 512, 4, 64), "float32", False),
        slow((512, 4, 64), (512, 4, 64), "float32", False),
        ((2, 3, 2, 128, 4, 64), (2, 3, 2, 128, 4, 64), "float32", False),
        slow((1, 1024, 4, 48), (1, 1024, 4, 48), "float32", False),
        slow((1, 1024, 4, 64), (1, 1024, 4, 64), "float32", True),
    ],
)
def test_self_and_cross_attention(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: str, causal: bool
) -> None:
    check_gradients(q_shape, kv_shape, dtype, causal)


@pytest.mark.slow
@pytest.mark.parametrize("permuted", ["queries", "keys"])
def test_positions_in_any_order(permuted: str) -> None:
    """Where keys are permuted, the first query sees one key, wherever it is."""
    order = np.random.default_rng(0).permutation(512).astype(np.int32)
    masks = (order, np.arange(512, dtype=np.int32))
    masks = masks if permuted == "queries" else masks[::-1]
    check_gradients((2, 512, 4, 64), (2, 512, 4, 64), "float32", True, *masks)


@pytest.mark.slow
def test_padding_of_nan_and_the_largest_numbers() -> None:
    """In queries and keys of padding NaN, in values the largest float32; no result is NaN."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 1024, 4, 64)).astype(np.float32)
    q_segments, kv_segments = (
        np.where(np.arange(1024) < np.array(lengths)[:, None], 0, -1) for lengths in ((456, 987), (123, 999))
    )
    real, used = (x[..., None, None] == 0 for x in (q_segments, kv_segments))
    out, _ = attention(
        np.where(real, q, np.float32(np.nan)),
        np.where(used, k, np.float32(np.nan)),
        np.where(used, v, np.finfo(np.float32).max),
        q_segment_ids=q_segments,
        kv_segment_ids=kv_segments,
        causal=False,
    )
    want, _ = dense(q, k, v, np.broadcast_to(kv_segments[:, None] == 0, (2, 1024, 1024)))
    assert_close(out[q_segments == 0], want[q_segments == 0], 1e-6, 1e-6)
    assert not np.any(out[q_segments < 0])
