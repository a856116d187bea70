"""Merges the pieces of items: `merge_states` where only the device knows which pieces each item has.

A thread block computes one row at a time, or a few if there are many; a thread has the same columns of every piece.
Pieces are read in groups: all loads of a group are in flight before the first is used, and those of the next group
before the last one is absorbed, so that a row doesn't take the latency of a read for each of its pieces. All groups but
the first are whole; that one repeats its last piece, which is then in the cache: no piece is read that a row doesn't
have. Groups come in a fixed order, so results repeat bit for bit.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.device import Device
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.adapter import LOWEST, ROW, cast, read

# Thread blocks of many rows that a multiprocessor holds at once, by their registers.
RESIDENT = 5
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
    num_tiles = pieces.shape[0] * group // heads
    config = MergeConfig.choose(num_tokens * heads, heads, head_size)
    kernel = adapter.kernel(
        functools.partial(_kernel, config, _Layout(heads, group, num_tiles, block_q)),
        [((num_tokens, heads, head_size), out_dtype), ((num_tokens, heads), jnp.float32)],
        like=out,
        kernel_name="merge_pieces",
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=1,
    )
    return kernel(out, lse, pieces, place)


class MergeConfig(NamedTuple):
    """Static sizes of one call."""

    num_blocks: int  # thread blocks
    num_rows: int  # that one computes at once
    num_loads: int  # pieces of a group

    @classmethod
    def choose(cls, total: int, heads: int, head_size: int) -> "MergeConfig":
        """The fewer the rows, the more pieces each may have, up to one of each worker; many have one to three.

        With many rows, several at once keep more loads in flight than many pieces of one.
        """
        num_sms = Device.target().num_multiprocessors
        if total > RESIDENT * num_sms:
            num_rows = next(n for n in (4, 2, 1) if heads % n == 0)
            return cls(min(total // num_rows, RESIDENT * num_sms), num_rows, 2)
        values = 1 if head_size == 128 else 2  # of a piece in a thread
        return cls(total, 1, 8 if total > 2 * num_sms else 32 // values)


class _Layout(NamedTuple):
    """Places of rows."""

    heads: int
    group: int
    num_tiles: int
    block_q: int

    def find(self, pieces: Any, place: Any, token: Array, head: Array, num_loads: int) -> "_Row":
        row_head, of_group = (op(head, jnp.int32(self.group)) for op in (lax.div, lax.rem))
        at = place[token, of_group]
        tile, slot = (op(jnp.maximum(at, 0), jnp.int32(self.block_q)) for op in (lax.div, lax.rem))
        item = row_head * self.num_tiles + tile
        # + 0 drops the mesh axes from the types, as loop bounds must not vary over them.
        number = jnp.where(at >= 0, pieces[item, 1], 0) + 0
        in_first = jnp.where(number > 0, lax.rem(number - 1, jnp.int32(num_loads)) + 1, 0)
        return _Row(token, head, slot, pieces[item, 0] + 0, number, in_first)


class _Row(NamedTuple):
    """A head of a token: a slot of the pieces [first, first + number)."""

    token: Array
    head: Array
    slot: Array
    first: Array
    number: Array
    in_first: Array  # how many of them are in the first group: what is left after whole ones


def _kernel(
    config: MergeConfig, where: _Layout, outs: Any, lses: Any, pieces: Any, place: Any, out_ref: Any, lse_ref: Any
) -> None:
    head_size, (num_tokens, heads) = outs.shape[-1], lse_ref.shape
    # Fewer columns than threads need another layout, in which several threads have the same.
    layout = plgpu.Layout.WG_STRIDED((head_size,), head_size // 128) if head_size % 128 == 0 else ROW

    def load_first(row: _Row) -> tuple[list[Array], list[Array]]:
        """Load lse and out of the first pieces, as many as a row has left after whole groups; -inf for the rest."""
        numbers = range(config.num_loads)
        at = [row.first + jnp.minimum(number, jnp.maximum(row.in_first - 1, 0)) for number in numbers]
        loaded = [(lses[piece, row.slot], read(outs.at[piece, row.slot], layout)) for piece in at]
        masked = [
            jnp.where(number < row.in_first, lse, -jnp.inf) for number, (lse, _) in zip(numbers, loaded, strict=True)
        ]
        return masked, [out for _, out in loaded]

    def load(row: _Row, n: Any) -> tuple[list[Array], list[Array]]:
        """Load lse and out of the n-th group after the first."""
        own = pl.ds(row.first + row.in_first + n * config.num_loads, config.num_loads)
        # The places of a group differ by constants, so that one address serves it.
        lse, out = lses.at[own], outs.at[own]
        numbers = range(config.num_loads)
        # + 0 drops the mesh axes from the types, as those of the first group have none.
        return [lse[number, row.slot] + 0 for number in numbers], [
            read(out.at[number, row.slot], layout) for number in numbers
        ]

    def merge_row(row: _Row, group: tuple[list[Array], list[Array]]) -> None:
        def step(n: Array, carry: Any) -> Any:
            state, group = carry
            following = load(row, n)
            return state.absorb(*group), following

        nothing = _State(cast(jnp.zeros(head_size, jnp.float32), layout), jnp.float32(LOWEST), jnp.float32(0))
        num_groups = lax.div(row.number - row.in_first, jnp.int32(config.num_loads))
        state, group = lax.fori_loop(0, num_groups, step, (nothing, group))
        out, lse = state.absorb(*group).results()
        adapter.write(out_ref.at[row.token, row.head], out.astype(out_ref.dtype))
        adapter.write(lse_ref.at[row.token, row.head], lse)

    num_steps, block = num_tokens * heads // config.num_rows, lax.axis_index("block") + 0

    def merge_rows(n: Any, _: None) -> None:
        first = (block + n * config.num_blocks) * config.num_rows
        token, head = lax.div(first, jnp.int32(heads)), lax.rem(first, jnp.int32(heads))
        rows = [where.find(pieces, place, token, head + n, config.num_loads) for n in range(config.num_rows)]
        groups = [load_first(row) for row in rows]
        for row, group in zip(rows, groups, strict=True):
            merge_row(row, group)

    if config.num_blocks == num_steps:
        merge_rows(0, None)
    else:
        num_own = lax.div(num_steps - 1 - block, jnp.int32(config.num_blocks)) + 1
        lax.fori_loop(0, num_own, merge_rows, None)


class _State(NamedTuple):
    """State of one row: `acc` `[H]` and `total` are sums of weights exp(lse - peak)."""

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
    """Return the maximum of a power of two of values, in pairs: a chain would take the latency of each."""
    while len(values) > 1:
        values = [jnp.maximum(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
