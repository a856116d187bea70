"""Merges the pieces of items: `merge_states` where only the device knows which pieces each item has.

A thread block computes one row, or a few if there are many; a thread has the same columns of every piece. Pieces are
read in groups: all loads of a group are in flight before the first is used, so that a row takes the latency of a few
reads, not of one for each piece. No piece is read that a row doesn't have. Groups come in a fixed order, so results
repeat bit for bit.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.attention.online_softmax import LOWEST
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.adapter import ROW, cast, read

# Pieces of a group; what remains of the rows' pieces takes at most one group of each other size.
_GROUPS = (16, 8, 4, 2, 1)
# With more rows than multiprocessors can hold at once, a thread block computes several.
_ROWS_AT_ONCE = 12 * 132


@kernel_jit("heads", "out_dtype")
def merge_pieces(
    out: Array, lse: Array, pieces: Array, place: Array, heads: int, out_dtype: Any
) -> tuple[Array, Array]:
    """Merge pieces, and bring the rows of tiles to the order of tokens.

    Args:
      out: `[pieces, block_q, H]` float32.
      lse: `[pieces, block_q]` float32, natural log; -inf where a row saw nothing, and out is then finite.
      pieces: `Work.pieces` `[row heads * tiles, 2]`.
      place: `[tokens, group]` int32: tile * block_q + row, where a token's row of each head of a group is; negative: it
        has none.
      heads: row heads times group.

    Returns:
      out `[tokens, heads, H]` in `out_dtype` and lse `[tokens, heads]` float32. Rows without a place or a piece, or all
      of whose pieces are empty, get 0 and -inf.
    """
    (_, block_q, head_size), (num_tokens, group) = out.shape, place.shape
    num_tiles = pieces.shape[0] * group // heads
    num_rows = next(n for n in (4, 2, 1) if heads % n == 0 and (num_tokens * heads >= n * _ROWS_AT_ONCE or n == 1))
    kernel = adapter.kernel(
        functools.partial(_kernel, _Sizes(heads, group, num_tiles, block_q, num_rows)),
        [((num_tokens, heads, head_size), out_dtype), ((num_tokens, heads), jnp.float32)],
        like=out,
        kernel_name="merge_pieces",
        # CUDA bounds all grid axes but the last one here to 65,535.
        grid=(heads // num_rows, num_tokens),
        grid_names=("heads", "token"),
        num_threads=1,
    )
    return kernel(out, lse, pieces, place)


class _Sizes(NamedTuple):
    heads: int
    group: int
    num_tiles: int
    block_q: int
    num_rows: int


class _State(NamedTuple):
    """Of one row: `acc` `[H]` and `total` are sums of weights exp(lse - peak)."""

    acc: Any
    peak: Any
    total: Any


def _kernel(sizes: _Sizes, outs: Any, lses: Any, pieces: Any, place: Any, out_ref: Any, lse_ref: Any) -> None:
    token, heads = lax.axis_index("token"), lax.axis_index("heads")
    for i in range(sizes.num_rows):
        head = heads * sizes.num_rows + i
        at = place[token, lax.rem(head, jnp.int32(sizes.group))]
        tile, row = (op(jnp.maximum(at, 0), jnp.int32(sizes.block_q)) for op in (lax.div, lax.rem))
        item = lax.div(head, jnp.int32(sizes.group)) * sizes.num_tiles + tile
        number = jnp.where(at >= 0, pieces[item, 1], 0)
        # + 0 drops the mesh axes from the types, as loop bounds must not vary over them.
        state = _merge_row(outs, lses, row, pieces[item, 0] + 0, number + 0)
        empty = state.total == 0
        total = jnp.where(empty, jnp.float32(1), state.total)
        out_ref.at[token, head][...] = (state.acc * (1 / total)).astype(out_ref.dtype)
        lse_ref.at[token, head][...] = jnp.where(empty, jnp.float32(-jnp.inf), state.peak + jnp.log(total))


def _merge_row(outs: Any, lses: Any, row: Array, first: Array, number: Array) -> _State:
    """Merge one row of the pieces [first, first + number)."""
    head_size = outs.shape[-1]
    # Fewer columns than threads need another layout, in which several threads have the same.
    layout = plgpu.Layout.WG_STRIDED((head_size,), head_size // 128) if head_size % 128 == 0 else ROW

    def absorb(piece: Array, state: _State, size: int) -> _State:
        lse = [lses[piece + n, row] for n in range(size)]
        out = [read(outs.at[piece + n, row], layout) for n in range(size)]
        # The peak begins finite, so that an empty piece, whose lse is -inf, has weight 0.
        peak = functools.reduce(jnp.maximum, lse, state.peak)
        decay = jnp.exp(state.peak - peak)
        acc, total = state.acc * decay, state.total * decay
        for n in range(size):
            weight = jnp.exp(lse[n] - peak)
            acc, total = acc + out[n] * weight, total + weight
        return _State(acc, peak, total)

    state = _State(cast(jnp.zeros(head_size, jnp.float32), layout), jnp.float32(LOWEST), jnp.float32(0))
    for size in _GROUPS:
        num_groups = lax.div(number, jnp.int32(size))
        step = functools.partial(_group_step, absorb, first, size)
        state = lax.fori_loop(0, num_groups, step, state)
        first, number = first + num_groups * size, number - num_groups * size
    return state


def _group_step(absorb: Any, first: Array, size: int, n: Array, state: _State) -> _State:
    return absorb(first + n * size, state, size)
