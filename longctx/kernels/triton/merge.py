"""Merges the pieces of items: `merge_states` where only the device knows which pieces each item has.

A program has a few rows, and loads several pieces of each at once, so that a row does not take the latency of a read
for each of its pieces. Those that a row does not have are masked, and cost no traffic.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from longctx.kernels.device import Device
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.triton import adapter
from longctx.kernels.triton.scores import LOG2E
from longctx.kernels.triton.tile_config import TileConfig, power_over

# Float32 numbers that the threads of a program hold of pieces.
_HELD = 4096
_MOST_PIECES = 32


@kernel_jit("heads", "out_dtype")
def merge_pieces(
    out: Array, lse: Array, pieces: Array, place: Array, heads: int, out_dtype: Any
) -> tuple[Array, Array]:
    """Merge pieces, and bring the rows of tiles to the order of tokens.

    Args:
      out: `[pieces, block_q, H]` float32.
      lse: `[pieces, block_q]` float32, natural log; -inf where a row saw nothing, and out is then finite.
      pieces: `Work.pieces` `[KV heads * tiles, 2]`.
      place: `[tokens, group]` int32: tile * block_q + row, where a token's row of each head of a group is; negative: it
        has none.
      heads: KV heads times group.

    Returns:
      out `[tokens, heads, H]` in `out_dtype` and lse `[tokens, heads]` float32. Rows without a place or a piece, or all
      of whose pieces are empty, get 0 and -inf.
    """
    (_, block_q, head_size), (num_tokens, group) = out.shape, place.shape
    num_rows, num_loads = _sizes(num_tokens * heads, head_size)
    layout = _Layout(heads, group, pieces.shape[0] * group // heads, block_q, num_tokens)
    kernel = adapter.kernel(
        functools.partial(_kernel, layout, num_rows, num_loads),
        [((num_tokens, heads, head_size), out_dtype), ((num_tokens, heads), jnp.float32)],
        like=out,
        grid=(-(-num_tokens * heads // num_rows),),
        config=TileConfig(num_rows, num_loads, num_warps=4, num_stages=1),
        name="merge_pieces",
    )
    merged, of_rows = kernel(out, lse, pieces, place)
    return merged, of_rows


def _sizes(total: int, head_size: int) -> tuple[int, int]:
    """Rows of a program, and pieces of each that it loads at once.

    The fewer the rows, the more pieces each may have, up to one of each worker; many have one to three.
    """
    held = max(1, _HELD // power_over(head_size))
    few = 4 * Device.target().num_multiprocessors
    num_loads = min(_MOST_PIECES, held) if total <= few else min(8, held) if total <= 8 * few else 2
    return max(1, held // num_loads) if total > few else 1, num_loads


class _Layout(NamedTuple):
    """Places of rows."""

    heads: int
    group: int
    num_tiles: int
    block_q: int
    num_tokens: int


def _kernel(layout: _Layout, num_rows: int, num_loads: int, *refs: Any) -> None:
    outs, lses, pieces, place, out_ref, lse_ref = refs
    head_size = outs.shape[-1]
    row = pl.program_id(0) * num_rows + lax.iota(jnp.int32, num_rows)
    exists = row < layout.num_tokens * layout.heads
    token, head = (op(row, jnp.int32(layout.heads)) for op in (lax.div, lax.rem))
    kv_head, of_group = (op(head, jnp.int32(layout.group)) for op in (lax.div, lax.rem))
    at = adapter.load(place, token, of_group, mask=exists, other=-1)
    tile, slot = (op(jnp.maximum(at, 0), jnp.int32(layout.block_q)) for op in (lax.div, lax.rem))
    item = kv_head * layout.num_tiles + tile
    first, number = (adapter.load(pieces, item, jnp.full_like(item, column), mask=at >= 0) for column in (0, 1))
    column = lax.iota(jnp.int32, power_over(head_size))
    is_column = column < head_size

    def absorb(n: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Take in the next pieces of each row."""
        peak, total, acc = state
        piece = n * num_loads + lax.iota(jnp.int32, num_loads)
        has = piece[None, :] < number[:, None]
        shape = (*has.shape, column.size)
        index = [jnp.broadcast_to(x, has.shape) for x in (first[:, None] + piece[None, :], slot[:, None])]
        lse = adapter.load(lses, *index, mask=has, other=-jnp.inf)
        own = jnp.broadcast_to(has[:, :, None] & is_column[None, None, :], shape)
        wide = (*(x[:, :, None] for x in index), column[None, None, :])
        out = adapter.load(outs, *(jnp.broadcast_to(x, shape) for x in wide), mask=own)
        after = jnp.maximum(peak, jnp.max(lse, 1))
        finite = jnp.where(after == -jnp.inf, 0.0, after)
        weights, decay = jnp.exp2((lse - finite[:, None]) * LOG2E), jnp.exp2((peak - finite) * LOG2E)
        return (
            after,
            total * decay + jnp.sum(weights, 1),
            acc * decay[:, None] + jnp.sum(out * weights[:, :, None], 1),
        )

    of_rows = jnp.full((num_rows,), -jnp.inf, jnp.float32), jnp.zeros((num_rows,), jnp.float32)
    nothing = *of_rows, jnp.zeros((num_rows, column.size), jnp.float32)
    # + 0 drops the mesh axes from the type, as loop bounds must not vary over them.
    num_groups = lax.div(jnp.max(number) + num_loads - 1, jnp.int32(num_loads)) + 0
    peak, total, acc = lax.fori_loop(0, num_groups, absorb, nothing)
    is_empty = total == 0
    total = jnp.where(is_empty, 1.0, total)
    out = acc / total[:, None]
    shape = out.shape
    index = (jnp.broadcast_to(x, shape) for x in (token[:, None], head[:, None], column[None, :]))
    adapter.store(out_ref, *index, value=out, mask=jnp.broadcast_to(exists[:, None] & is_column[None, :], shape))
    adapter.store(lse_ref, token, head, value=jnp.where(is_empty, -jnp.inf, peak + jnp.log(total)), mask=exists)
