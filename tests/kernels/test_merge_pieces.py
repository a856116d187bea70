"""The kernels that merge pieces, in their interpreters, against `merge_states`."""

import jax.numpy as jnp
import numpy as np
import pytest

from longctx.kernels import merge_states
from longctx.kernels.device import Device, compiled_for
from longctx.kernels.mosaic_gpu.adapter import interpreted
from longctx.kernels.mosaic_gpu.merge import merge_pieces
from longctx.kernels.triton import adapter as triton
from longctx.kernels.triton import merge as triton_merge

KERNELS = {
    "mosaic_gpu": (interpreted, merge_pieces),
    "triton": (triton.interpreted, triton_merge.merge_pieces),
}


def drawn(numbers: list[int], block_q: int, head_size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """out, lse and `Work.pieces` of items with so many pieces; NaN in pieces that no item has."""
    rng = np.random.default_rng(seed)
    first = np.cumsum([2, *numbers])[:-1]
    total = sum(numbers) + 5
    out, lse = np.full((total, block_q, head_size), np.nan), np.full((total, block_q), np.nan)
    used = slice(2, 2 + sum(numbers))
    out[used], lse[used] = rng.standard_normal(out[used].shape), 30 * rng.standard_normal(lse[used].shape)
    empty = np.zeros_like(lse, bool)
    empty[used] = rng.random(lse[used].shape) < 0.2
    out[empty], lse[empty] = 0, -np.inf
    return out.astype(np.float32), lse.astype(np.float32), np.stack([first, numbers], 1).astype(np.int32)


@pytest.mark.parametrize(
    ("implementation", "numbers", "group", "head_size", "dtype"),
    [
        ("mosaic_gpu", [1, 0, 37, 2], 2, 64, "float32"),
        ("mosaic_gpu", [23, 3], 3, 128, "bfloat16"),
        ("mosaic_gpu", [5, 0], 1, 256, "float16"),
        ("triton", [1, 0, 37, 2], 2, 80, "float32"),
        ("triton", [23, 3], 3, 128, "bfloat16"),
    ],
)
def test_pieces_of_every_number_merge(
    implementation: str, numbers: list[int], group: int, head_size: int, dtype: str
) -> None:
    """Rows in any order, in tiles of which a head has two (or one); padding; empty pieces; unused ones are not read."""
    row_heads, block_q, tokens = 2, 16, 3
    num_tiles = len(numbers) // row_heads
    out, lse, pieces = drawn(numbers, block_q, head_size, seed=len(numbers))
    rng = np.random.default_rng(1)
    place = rng.permutation(num_tiles * block_q)[: tokens * group].reshape(tokens, group).astype(np.int32)
    place[1, 0] = -1
    lse[pieces[0, 0] : pieces[0, 0] + pieces[0, 1], place[0, 0] % block_q] = -np.inf
    out[np.isneginf(lse)] = 0

    heads = row_heads * group
    want_out = np.zeros((tokens, heads, head_size), np.float32)
    want_lse = np.full((tokens, heads), -np.inf, np.float32)
    for token, head in np.ndindex(tokens, heads):
        tile, row = divmod(place[token, head % group], block_q)
        first, number = pieces[head // group * num_tiles + tile]
        if place[token, head % group] >= 0 and number:
            own = slice(first, first + number)
            want_out[token, head], want_lse[token, head] = merge_states(out[own, row], lse[own, row])

    arguments = [jnp.asarray(x) for x in (out, lse, pieces, place)]
    interpreted, merge = KERNELS[implementation]
    with interpreted():
        got_out, got_lse = merge(*arguments, heads, jnp.dtype(dtype))
    assert got_out.dtype == dtype
    np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(want_lse))
    seen = ~np.isneginf(want_lse)
    np.testing.assert_allclose(got_lse[seen], want_lse[seen], rtol=1e-6, atol=2e-6)
    got_out = np.asarray(got_out, np.float32)
    assert not got_out[~seen].any()
    tolerance = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(got_out, want_out, rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("implementation", KERNELS)
def test_more_rows_take_fewer_pieces_at_once(implementation: str, num_tokens: int) -> None:
    """On one multiprocessor 4 rows are not few, and 16 are many."""
    out, lse, pieces = drawn([1, 9, 2, 3], 16, 128, seed=3)
    place = np.array([[4], [9], [0], [15]], np.int32)[:num_tokens]
    merge = KERNELS[implementation][1]
    one = compiled_for(Device("cpu", "cpu", False, 1)) if implementation == "triton" else interpreted(1)
    with one:
        got_out, got_lse = merge(*(jnp.asarray(x) for x in (out, lse, pieces, place)), 4, jnp.float32)
    for token, head in np.ndindex(num_tokens, 4):
        own = slice(pieces[head, 0], pieces[head].sum())
        want_out, want_lse = merge_states(out[own, place[token, 0]], lse[own, place[token, 0]])
        np.testing.assert_allclose(got_out[token, head], want_out, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(got_lse[token, head], want_lse, rtol=1e-6, atol=2e-6)
