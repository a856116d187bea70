"""Tiles of paged attention in XLA: query rows of one sequence, and the pages that each tile needs.

Tiles follow from metadata alone, so they are the same in all layers. This code has no loops or scatters, so that XLA
can move it out of a scan over layers (on CPU all of it, on GPU about half) and compute it once for unrolled layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.kernels.paged_attention.operands import PagedOperands


class Tiles(NamedTuple):
    """Tiles of one size in rows; a tile may own fewer. Int32 arrays, of which the first `num` elements are valid."""

    num: Array  # []
    first: Array  # the tile owns rows first to stop - 1
    stop: Array
    sequence: Array
    num_full: Array  # number of leading page table entries of which all rows see every key
    num_entries: Array  # number of leading entries of which some row sees some key
    # Where rows don't see all before them: the numbers of leading entries of which no row sees a key, and of which some
    # row does not see all.
    first_entry: Array | None = None
    first_full: Array | None = None


def partition_rows(operands: PagedOperands, sizes: tuple[int, ...], before: int | None = None) -> list[Tiles]:
    """Partition every run of rows of one sequence into tiles of the last size and one tile for the rest.

    The tile for the rest has the least size that holds it. Sizes ascend, and the first is 1. A row sees no key more
    than `before` tokens before it; None: any.
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

    # The lists of all sizes are concatenated, so that one search makes all of them.
    above = np.array((0, *sizes[:-1]), np.int32)
    fits = (owned[None] > above[:, None]) & (owned[None] <= np.array(sizes, np.int32)[:, None])
    number = jnp.cumsum(fits, 1, dtype=jnp.int32)  # counted from 1
    capacities = num_rows // (above + 1)  # every tile of this size owns more than `above` rows
    level = np.repeat(np.arange(len(sizes), dtype=np.int32), capacities)
    wanted = np.concatenate([np.arange(capacity, dtype=np.int32) for capacity in capacities])
    # The first row of the n-th tile of its size; any row beyond the last tile.
    first = jnp.minimum(count_leading(lambda i: number[level, i] <= wanted, num_rows, wanted.shape), num_rows - 1)
    sequence = jnp.where(real[first], q_sequence[first], 0)
    stop = tile_stop[first]

    ends = np.cumsum(capacities)
    parts = [slice(end - capacity, end) for end, capacity in zip(ends, capacities, strict=True)]

    def extremes(x: Array) -> tuple[Array, Array]:
        """The lowest and the highest value in the rows of each tile."""
        found = [_extremes(x, size, first[part], stop[part]) for size, part in zip(sizes, parts, strict=True)]
        lowest, highest = (jnp.concatenate(x) for x in zip(*found, strict=True))
        return lowest, highest

    positions, first_seen = jax.tree.map(extremes, (operands.q_positions, operands.first_seen(before)))
    found = first, stop, sequence, *_count_entries(operands, positions, first_seen, sequence)
    return [Tiles(number[level, -1], *(x[part] for x in found)) for level, part in enumerate(parts)]


def _extremes(x: Array, size: int, first: Array, stop: Array) -> tuple[Array, Array]:
    """The lowest and the highest value of x `[T]`, -1 or more, in each tile `[n]` of one size."""
    rows = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    own = rows < stop[:, None]
    x = x[jnp.minimum(rows, x.shape[0] - 1)]
    return jnp.min(jnp.where(own, x, jnp.iinfo(jnp.int32).max), 1), jnp.max(jnp.where(own, x, -1), 1)


def _count_entries(
    operands: PagedOperands,
    positions: tuple[Array, Array],
    first_seen: tuple[Array, Array] | None,
    sequence: Array,
) -> tuple[Array, ...]:
    """Compute `num_full`, `num_entries` and, with a `first_seen`, `first_entry` and `first_full` of tiles `[n]`.

    Args:
      positions: the lowest and the highest of each tile's rows.
      first_seen: the lowest and the highest of the first positions that they see. None: they see all before them.
    """
    page_size, num_entries = operands.k_pages.shape[1], operands.page_table.shape[1]
    (lowest, highest), last_key = positions, operands.kv_lengths[sequence] - 1
    num_full = (jnp.minimum(lowest, last_key) + 1) // page_size
    first_unseen: tuple[Array, ...] = num_full, jnp.minimum(highest, last_key) // page_size + 1
    if first_seen is not None:
        seen_by_some, seen_by_all = first_seen
        first_unseen = *first_unseen, seen_by_some // page_size, -(-seen_by_all // page_size)
    page = jnp.stack(first_unseen)
    if operands.page_index is None:
        return tuple(jnp.clip(page, 0, num_entries))
    # Entries in use come first and ascend; all others are at or after the sequence's length.
    index = operands.page_index
    return tuple(count_leading(lambda entry: index[sequence[None], entry] < page, num_entries, page.shape))


def count_leading(holds: Callable[[Array], Array], size: int, shape: tuple[int, ...]) -> Array:
    """For each element of `shape`, how many leading indices of 0..size-1 `holds` is true for, by binary search."""
    count = jnp.zeros(shape, jnp.int32)
    step = 1 << max(0, size.bit_length() - 1)
    while step:
        tried = count + step
        fits = (tried <= size) & holds(jnp.minimum(tried, size) - 1)
        count = jnp.where(fits, tried, count)
        step //= 2
    return count
