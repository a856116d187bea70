"""How paged attention cuts its work: tiles of query rows of one sequence, and the pages that each needs.

Everything here follows from metadata: no layer changes it. It is written without loops and scatters, so that XLA can
move it out of a scan over layers (on CPU all of it, on GPU about half), and computes it once for unrolled layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.kernels.paged_attention.operands import PagedOperands


class Tiles(NamedTuple):
    """The tiles of one size, in rows, of which a tile may own less: int32 arrays, whose first `num` elements count."""

    num: Array  # []
    first: Array  # the tile owns rows first to stop - 1
    stop: Array
    sequence: Array
    num_full: Array  # so many entries of the page table, the first ones, are seen whole by all of its rows
    num_entries: Array  # and so many are seen at all


def partition_rows(operands: PagedOperands, sizes: tuple[int, ...]) -> list[Tiles]:
    """Cut every run of rows of one sequence into tiles of the last size, and one of the least size that holds the rest.

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

    # The lists of all sizes lie one behind the other, so that one search makes them, and one serves them.
    above = np.array((0, *sizes[:-1]), np.int32)
    fits = (owned[None] > above[:, None]) & (owned[None] <= np.array(sizes, np.int32)[:, None])
    number = jnp.cumsum(fits, 1, dtype=jnp.int32)  # counted from 1
    capacities = num_rows // (above + 1)  # no tile of a size owns fewer rows
    level = np.repeat(np.arange(len(sizes), dtype=np.int32), capacities)
    wanted = np.concatenate([np.arange(capacity, dtype=np.int32) for capacity in capacities])
    # Where the n-th of its size begins; beyond the last one, anywhere.
    first = jnp.minimum(count_leading(lambda i: number[level, i] <= wanted, num_rows, wanted.shape), num_rows - 1)
    sequence = jnp.where(real[first], q_sequence[first], 0)
    stop = tile_stop[first]

    ends = np.cumsum(capacities)
    parts = [slice(end - capacity, end) for end, capacity in zip(ends, capacities, strict=True)]
    extremes = [
        _extremes(operands.q_positions, size, first[part], stop[part]) for size, part in zip(sizes, parts, strict=True)
    ]
    lowest, highest = (jnp.concatenate(x) for x in zip(*extremes, strict=True))
    found = first, stop, sequence, *_count_entries(operands, lowest, highest, sequence)
    return [Tiles(number[level, -1], *(x[part] for x in found)) for level, part in enumerate(parts)]


def _extremes(positions: Array, size: int, first: Array, stop: Array) -> tuple[Array, Array]:
    """The lowest and highest position in each of some tiles `[n]` of one size."""
    rows = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    own = rows < stop[:, None]
    positions = positions[jnp.minimum(rows, positions.shape[0] - 1)]
    lowest = jnp.min(jnp.where(own, positions, jnp.iinfo(jnp.int32).max), 1)
    return lowest, jnp.max(jnp.where(own, positions, -1), 1)


def _count_entries(operands: PagedOperands, lowest: Array, highest: Array, sequence: Array) -> tuple[Array, Array]:
    """`num_full` and `num_entries` of tiles `[n]`."""
    page_size, num_entries = operands.k_pages.shape[1], operands.page_table.shape[1]
    last_key = operands.kv_lengths[sequence] - 1
    first_unseen = (jnp.minimum(lowest, last_key) + 1) // page_size, jnp.minimum(highest, last_key) // page_size + 1
    page = jnp.stack(first_unseen)
    if operands.page_index is None:
        num_full, num_seen = jnp.clip(page, 0, num_entries)
        return num_full, num_seen
    # Entries in use ascend and come first; all others are at the sequence's length or after.
    index = operands.page_index
    num_full, num_seen = count_leading(lambda entry: index[sequence[None], entry] < page, num_entries, page.shape)
    return num_full, num_seen


def count_leading(holds: Callable[[Array], Array], size: int, shape: tuple[int, ...]) -> Array:
    """How many of the indices 0..size-1 `holds` is true for, for each of `shape`: true for the first ones only."""
    count = jnp.zeros(shape, jnp.int32)
    step = 1 << max(0, size.bit_length() - 1)
    while step:
        tried = count + step
        fits = (tried <= size) & holds(jnp.minimum(tried, size) - 1)
        count = jnp.where(fits, tried, count)
        step //= 2
    return count
