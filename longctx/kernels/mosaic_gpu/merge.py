"""Merges the pieces of items: `merge_states` where only the device knows which pieces each item has.

A thread block computes one row, or a few if there are many; a thread has the same columns of every piece. Pieces are
read in groups: all loads of a group are in flight before the first is used, and those of the next group before the last
one is absorbed, so that a row doesn't take the latency of a read for each of its pieces. The last group repeats the
row's last piece, which is then in the cache: no other piece is read. Groups come in a fixed order, so results repeat
bit for bit.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.attention.online_softmax import LOWEST
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.adapter import ROW, cast, read
from longctx.kernels.mosaic_gpu.device import Device

_LOG2E = math.log2(math.e)


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
    sizes = _Sizes.choose(group, pieces.shape[0] * group // heads, block_q, num_tokens, heads, head_size)
    kernel = adapter.kernel(
        functools.partial(_kernel, sizes),
        [((num_tokens, heads, head_size), out_dtype), ((num_tokens, heads), jnp.float32)],
        like=out,
        kernel_name="merge_pieces",
        # CUDA bounds all grid axes but the last one here to 65,535.
        grid=(heads // sizes.num_rows, num_tokens),
        grid_names=("heads", "token"),
        num_threads=1,
    )
    return kernel(out, lse, pieces, place)


class _Sizes(NamedTuple):
    group: int
    num_tiles: int
    block_q: int
    num_rows: int  # that a thread block computes
    num_loads: int  # pieces of a group

    @classmethod
    def choose(cls, group: int, num_tiles: int, block_q: int, num_tokens: int, heads: int, head_size: int) -> "_Sizes":
        """The fewer the rows, the more pieces each may have, up to one of each worker; many have one to three.

        With many rows, several at once keep more loads in flight than many pieces of one.
        """
        rows = num_tokens * heads / Device.target().num_multiprocessors
        if rows > 12:
            return cls(group, num_tiles, block_q, next(n for n in (4, 2, 1) if heads % n == 0), 2)
        values = 1 if head_size == 128 else 2  # of a piece in a thread
        return cls(group, num_tiles, block_q, 1, 8 if rows > 2 else 32 // values)


def _kernel(sizes: _Sizes, outs: Any, lses: Any, pieces: Any, place: Any, out_ref: Any, lse_ref: Any) -> None:
    token, heads = lax.axis_index("token"), lax.axis_index("heads")
    head_size = outs.shape[-1]
    # Fewer columns than threads need another layout, in which several threads have the same.
    layout = plgpu.Layout.WG_STRIDED((head_size,), head_size // 128) if head_size % 128 == 0 else ROW

    def load(row: _Row, group: Any) -> tuple[list[Array], list[Array]]:
        """lse and out of a group of pieces; -inf where the row has no more."""
        numbers = [group * sizes.num_loads + n for n in range(sizes.num_loads)]
        at = [row.first + jnp.clip(number, 0, jnp.maximum(row.number - 1, 0)) for number in numbers]
        loaded = [(lses[piece, row.slot], read(outs.at[piece, row.slot], layout)) for piece in at]
        mask = [number < row.number for number in numbers]
        return [jnp.where(m, lse, -jnp.inf) for m, (lse, _) in zip(mask, loaded, strict=True)], [x for _, x in loaded]

    of_block = [heads * sizes.num_rows + n for n in range(sizes.num_rows)]
    rows = [_Row.find(sizes, pieces, place, token, head) for head in of_block]
    groups = [load(row, 0) for row in rows]
    for head, row, group in zip(of_block, rows, groups, strict=True):

        def step(n: Array, carry: Any, row: _Row = row) -> Any:
            state, group = carry
            following = load(row, n + 1)
            return state.absorb(*group), following

        nothing = _State(cast(jnp.zeros(head_size, jnp.float32), layout), jnp.float32(LOWEST), jnp.float32(0))
        num_groups = lax.div(row.number + (sizes.num_loads - 1), jnp.int32(sizes.num_loads))
        state, group = lax.fori_loop(0, num_groups - 1, step, (nothing, group))
        out, lse = state.absorb(*group).results()
        out_ref.at[token, head][...] = out.astype(out_ref.dtype)
        lse_ref.at[token, head][...] = lse


class _Row(NamedTuple):
    """Where a row is: its slot in the pieces [first, first + number)."""

    slot: Array
    first: Array
    number: Array

    @classmethod
    def find(cls, sizes: _Sizes, pieces: Any, place: Any, token: Array, head: Array) -> "_Row":
        row_head, of_group = (op(head, jnp.int32(sizes.group)) for op in (lax.div, lax.rem))
        at = place[token, of_group]
        tile, slot = (op(jnp.maximum(at, 0), jnp.int32(sizes.block_q)) for op in (lax.div, lax.rem))
        item = row_head * sizes.num_tiles + tile
        # + 0 drops the mesh axes from the types, as loop bounds must not vary over them.
        return cls(slot, pieces[item, 0] + 0, jnp.where(at >= 0, pieces[item, 1], 0) + 0)


class _State(NamedTuple):
    """Of one row: `acc` `[H]` and `total` are sums of weights exp(lse - peak)."""

    acc: Array
    peak: Array
    total: Array

    def absorb(self, lses: list[Array], outs: list[Array]) -> "_State":
        # The peak begins finite, so that an empty piece, whose lse is -inf, has weight 0.
        peak = jnp.maximum(self.peak, _max(lses))
        decay = _exp(self.peak - peak)
        acc, total = self.acc * decay, self.total * decay
        for lse, out in zip(lses, outs, strict=True):
            weight = _exp(lse - peak)
            acc, total = acc + out * weight, total + weight
        return _State(acc, peak, total)

    def results(self) -> tuple[Array, Array]:
        """(out, lse)."""
        empty = self.total == 0
        total = jnp.where(empty, jnp.float32(1), self.total)
        # What a row without pieces has loaded may be NaN.
        out = jnp.where(empty, jnp.zeros_like(self.acc), self.acc * (1 / total))
        return out, jnp.where(empty, jnp.float32(-jnp.inf), self.peak + jnp.log(total))


def _exp(x: Array) -> Array:
    # In base 2 it is one instruction.
    return jnp.exp2(x * _LOG2E)


def _max(values: list[Array]) -> Array:
    """Of a power of two of values, in pairs: a chain would take the latency of each."""
    while len(values) > 1:
        values = [jnp.maximum(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
