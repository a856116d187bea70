"""Merges the pieces of tiles: `merge_states` where only the device knows which pieces each tile has."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from longctx.kernels.attention.online_softmax import LOWEST
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.adapter import ROW, TILE, broadcast, cast, read
from longctx.kernels.mosaic_gpu.tile_config import WARPGROUP_ROWS
from longctx.kernels.mosaic_gpu.work import Work


@kernel_jit()
def merge_pieces(out: Array, lse: Array, work: Work) -> tuple[Array, Array]:
    """Merge out `[pieces, rows, heads, H]` and lse `[heads, pieces, rows]` into the same arrays with tiles for pieces.

    Pieces merge in a fixed order. A tile without pieces is not written.
    """
    _, rows, heads, head_size = out.shape
    num_tiles = work.first_piece.shape[0]
    kernel = adapter.kernel(
        functools.partial(_kernel, head_size),
        [((num_tiles, rows, heads, head_size), jnp.float32), ((heads, num_tiles, rows), jnp.float32)],
        like=out,
        kernel_name="merge_pieces",
        grid=(heads, rows // WARPGROUP_ROWS, num_tiles),
        grid_names=("head", "part", "tile"),
        num_threads=1,
    )
    return kernel(out, lse, work.first_piece, work.num_pieces)


def _kernel(
    head_size: int, outs: Any, lses: Any, first_piece: Any, num_pieces: Any, out_ref: Any, lse_ref: Any
) -> None:
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    own = pl.ds(lax.axis_index("part") * WARPGROUP_ROWS, WARPGROUP_ROWS)
    shape = (WARPGROUP_ROWS, head_size)

    def absorb(piece: Array, carry: Any) -> Any:
        acc, peak, total = carry
        lse = read(lses.at[head, piece, own], ROW)
        # The peak begins finite, so that an empty state, whose lse is -inf, has weight 0.
        new_peak = jnp.maximum(peak, lse)
        weight, decay = jnp.exp(lse - new_peak), jnp.exp(peak - new_peak)
        out = read(outs.at[piece, own, head], TILE)
        acc = acc * broadcast(decay, shape, 0) + out * broadcast(weight, shape, 0)
        return acc, new_peak, total * decay + weight

    @pl.when(num_pieces[tile] > 0)
    def _() -> None:
        carry = (
            cast(jnp.zeros(shape, jnp.float32), TILE),
            cast(jnp.full((WARPGROUP_ROWS,), LOWEST, jnp.float32), ROW),
            cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROW),
        )
        first = first_piece[tile] + 0
        acc, peak, total = lax.fori_loop(first, first + num_pieces[tile], absorb, carry)
        empty = total == 0
        total = jnp.where(empty, jnp.float32(1), total)
        out_ref.at[tile, own, head][...] = acc * broadcast(1 / total, shape, 0)
        lse_ref.at[head, tile, own][...] = jnp.where(empty, jnp.float32(-jnp.inf), peak + jnp.log(total))
