"""How paged attention cuts its work: tiles of query rows of one sequence, and the pages that each needs.

Everything here follows from metadata: no layer changes it. It is written without loops and scatters, so that XLA
moves it out of a scan over layers, and computes it once for layers that are unrolled.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from longctx.kernels.paged_attention.operands import PagedOperands


class Tiles(NamedTuple):
    """The tiles of one size: int32 arrays, of which the first `num` elements count."""

    size: int  # rows, of which a tile may own less
    num: Array  # []
    first: Array  # the tile owns rows first to stop - 1
    stop: Array
    sequence: Array
    num_full: Array  # so many entries of the page table, the first ones, are seen whole by all of its rows
    num_entries: Array  # and so many are seen at all


def cut_tiles(operands: PagedOperands, sizes: tuple[int, ...]) -> list[Tiles]:
    """Cut every run of rows of one sequence into tiles of the last size, and a rest, which takes the least that holds it.

    sizes ascend, the first being 1.
    """
    q_sequence = operands.q_sequence
    num_rows = q_sequence.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    real = (q_sequence >= 0) & (q_sequence < operands.kv_lengths.shape[0])
    change = q_sequence[1:] != q_sequence[:-1]
    edge = jnp.ones((1,), bool)
    run_first = lax.cummax(jnp.where(jnp.concatenate([edge, change]), row, 0))
    run_stop = lax.cummin(jnp.where(jnp.concatenate([change, edge]), row + 1, num_rows), reverse=True)
    tile_first = run_first + (row - run_first) // sizes[-1] * sizes[-1]
    tile_stop = jnp.minimum(tile_first + sizes[-1], run_stop)
    owned = jnp.where(real & (row == tile_first), tile_stop - tile_first, 0)

    def tiles(size: int, smaller: int) -> Tiles:
        number = jnp.cumsum((owned > smaller) & (owned <= size), dtype=jnp.int32)  # counted from 1
        wanted = jnp.arange(num_rows // (smaller + 1), dtype=jnp.int32)
        # Where the n-th begins; beyond the last one, any row.
        first = _count_leading(lambda i: number[i] <= wanted, num_rows, wanted.shape)
        first = jnp.minimum(first, num_rows - 1)
        stop = tile_stop[first]
        sequence = jnp.where(real[first], q_sequence[first], 0)
        return Tiles(size, number[-1], first, stop, sequence, *_count_entries(operands, size, first, stop, sequence))

    return [tiles(size, smaller) for smaller, size in zip((0, *sizes), sizes, strict=False)]


def _count_entries(
    operands: PagedOperands, size: int, first: Array, stop: Array, sequence: Array
) -> tuple[Array, Array]:
    """`num_full` and `num_entries` of tiles `[n]`."""
    page_size, num_entries = operands.k_pages.shape[1], operands.page_table.shape[1]
    rows = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    positions = operands.q_positions[jnp.minimum(rows, operands.q_positions.shape[0] - 1)]
    own = rows < stop[:, None]
    last_key = operands.kv_lengths[sequence] - 1
    lowest = jnp.minimum(jnp.min(jnp.where(own, positions, jnp.iinfo(jnp.int32).max), 1), last_key)
    highest = jnp.minimum(jnp.max(jnp.where(own, positions, -1), 1), last_key)

    def count_below(page: Array) -> Array:
        """Entries in use ascend and come first; all others are at the sequence's length or after."""
        if operands.page_index is None:
            return jnp.clip(page, 0, num_entries)
        index = operands.page_index
        return _count_leading(lambda entry: index[sequence, entry] < page, num_entries, page.shape)

    return count_below((lowest + 1) // page_size), count_below(highest // page_size + 1)


def _count_leading(holds: Callable[[Array], Array], size: int, shape: tuple[int, ...]) -> Array:
    """How many of the indices 0..size-1 `holds` is true for, for each of `shape`: true for the first ones only."""
    count = jnp.zeros(shape, jnp.int32)
    step = 1 << max(0, size.bit_length() - 1)
    while step:
        tried = count + step
        fits = (tried <= size) & holds(jnp.minimum(tried, size) - 1)
        count = jnp.where(fits, tried, count)
        step //= 2
    return count
