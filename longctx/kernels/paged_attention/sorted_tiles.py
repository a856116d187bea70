"""Tiles of rows sorted by sequence, and their assignment to the workers of a kernel that looks pages up by itself."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from longctx.kernels.paged_attention.operands import PagedOperands
from longctx.kernels.paged_attention.tiles import count_leading
from longctx.kernels.work import Tiles, Work, equal_shares


class SortedTiles(NamedTuple):
    """Tables that follow from shapes and metadata alone, and are the same in all layers.

    The kernel's rows are those of q with the heads of a group folded in, sorted by sequence. Each sequence begins at a
    multiple of an alignment; the rows between repeat its last one.
    """

    token: Array  # [rows], the row of q and the head of its group that a row of the kernel takes
    head: Array  # [rows]
    seen: tuple[Array, ...]  # [tiles, block_q], the last slot that each row sees and, where there is a limit, the first
    work: Work
    place: Array  # [T, G], tile * block_q + row: where the rows of a row of q are; -1: it is padding


def sort_tiles(
    operands: PagedOperands,
    before: int | None,
    block_q: int,
    block_kv: int,
    num_workers: int,
    implementation: str,
    alignment: int = 1,
) -> SortedTiles:
    """Make tiles, each of rows of one sequence, all but its last tile full, and assign them to workers.

    A row sees no key more than `before` tokens before it; None: any.

    Args:
      block_q: rows of a tile.
      block_kv: slots of a block.
      implementation: its name, for errors.
      alignment: rows of a sequence begin at a multiple of it.
    """
    (length, heads, _), kv_heads = operands.q.shape, operands.k_pages.shape[2]
    group, num_sequences = heads // kv_heads, operands.page_table.shape[0]
    real = (operands.q_sequence >= 0) & (operands.q_sequence < num_sequences)
    sequence = jnp.where(real, operands.q_sequence, num_sequences)
    order = jnp.argsort(sequence, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(length, dtype=jnp.int32))

    # The tokens, rows and tiles of each sequence.
    number = jnp.arange(num_sequences, dtype=jnp.int32)
    num_tokens = jnp.sum(sequence[None] == number[:, None], 1, dtype=jnp.int32)
    first_token = jnp.cumsum(num_tokens, dtype=jnp.int32) - num_tokens
    num_rows = group * num_tokens
    stop_row = jnp.cumsum(_round_up(num_rows, alignment), dtype=jnp.int32)
    first_row = stop_row - _round_up(num_rows, alignment)
    num_tiles = -(-num_rows // block_q)
    stop_tile = jnp.cumsum(num_tiles, dtype=jnp.int32)
    first_tile = stop_tile - num_tiles

    row = jnp.arange(max_rows(length, group, num_sequences, alignment), dtype=jnp.int32)
    of = _index_below(stop_row, row)
    within = jnp.clip(row - first_row[of], 0, jnp.maximum(num_rows[of] - 1, 0))
    token, head = order[jnp.minimum(first_token[of] + within // group, length - 1)], within % group
    seen = jnp.where(real, _count_slots(operands, operands.q_positions, operands.q_sequence), 0)

    tile = jnp.arange(length * group // block_q + min(length, num_sequences), dtype=jnp.int32)
    slots = operands.page_table.shape[1] * operands.k_pages.shape[1]
    if kv_heads * tile.size * -(-slots // block_kv) > jnp.iinfo(jnp.int32).max:
        raise NotImplementedError(
            f"implementation {implementation!r} counts blocks in int32, which {length} rows of q with {heads} heads "
            f"over {slots} slots of a page table exceed: pass fewer rows at a time"
        )
    of = _index_below(stop_tile, tile)
    used = tile < stop_tile[-1]
    first = first_row[of] + (tile - first_tile[of]) * block_q
    # Rows of a tile beyond its own repeat its last row, so that they add no masked blocks.
    of_tile = first[:, None] + jnp.arange(block_q, dtype=jnp.int32)[None]
    of_tile = jnp.clip(of_tile, 0, (first_row + jnp.maximum(num_rows, 1))[of][:, None] - 1)
    tile_seen = jnp.where(used[:, None], seen[token][of_tile], 0)
    rows_seen: tuple[Array, ...] = (tile_seen - 1,)
    start = full_start = jnp.zeros_like(tile)
    first_seen = operands.first_seen(before)
    if first_seen is not None:
        unseen = _count_slots(operands, first_seen - 1, operands.q_sequence)
        tile_unseen = jnp.where(used[:, None], jnp.where(real, unseen, 0)[token][of_tile], 0)
        rows_seen += (tile_unseen,)
        start = jnp.min(tile_unseen, 1) // block_kv
        full_start = -(-jnp.max(tile_unseen, 1) // block_kv)
    everything = jnp.full_like(operands.kv_lengths, jnp.iinfo(jnp.int32).max - 1)
    written = _count_slots(operands, everything, number)

    none = jnp.zeros_like(tile)
    tiles = Tiles(
        q_batch=none,
        q_row=jnp.where(used, first, 0),
        kv=of,
        kv_tokens=written[of],
        start=start,
        full_start=full_start,
        full_stop=jnp.min(tile_seen, 1) // block_kv,
        stop=-(-jnp.max(tile_seen, 1) // block_kv),
    )
    if first_seen is not None:
        stop = jnp.maximum(tiles.stop, start)
        full_start = jnp.clip(full_start, start, stop)
        tiles = tiles._replace(full_start=full_start, full_stop=jnp.clip(tiles.full_stop, full_start, stop), stop=stop)
    work = equal_shares(tiles, kv_heads, num_workers)
    sequence = jnp.minimum(sequence, num_sequences - 1)
    within = (place - first_token[sequence])[:, None] * group + jnp.arange(group, dtype=jnp.int32)[None]
    place = first_tile[sequence][:, None] * block_q + within
    return SortedTiles(token, head, rows_seen, work, jnp.where(real[:, None], place, -1))


def max_rows(length: int, group: int, num_sequences: int, alignment: int) -> int:
    """Most rows of the kernel for `length` rows of q: each sequence is padded to a multiple of the alignment."""
    padding = alignment - math.gcd(group, alignment)
    return _round_up(length * group + padding * min(length, num_sequences), alignment)


def _round_up(x: Any, multiple: int) -> Any:
    return -(-x // multiple) * multiple


def _index_below(stops: Array, x: Array) -> Array:
    """The index of the interval that holds each x, of intervals that end at `stops`; the last one beyond all."""
    index = jnp.searchsorted(stops, x, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(index, stops.shape[0] - 1)


def _count_slots(operands: PagedOperands, positions: Array, sequence: Array) -> Array:
    """Count the slots of a sequence's listed pages, in order, with keys up to a position: `[n]`, `[n]` -> `[n]`."""
    page_size, num_entries = operands.k_pages.shape[1], operands.page_table.shape[1]
    sequence = jnp.clip(sequence, 0, operands.kv_lengths.shape[0] - 1)
    num_keys = jnp.maximum(jnp.minimum(positions, operands.kv_lengths[sequence] - 1) + 1, 0)
    if operands.page_index is None:
        return jnp.minimum(num_keys, num_entries * page_size)
    # Entries in use ascend and come first: whole pages, then perhaps the one that holds the last key.
    index = operands.page_index
    whole = count_leading(lambda entry: index[sequence, entry] < num_keys // page_size, num_entries, sequence.shape)
    is_here = (whole < num_entries) & (index[sequence, jnp.minimum(whole, num_entries - 1)] == num_keys // page_size)
    return whole * page_size + jnp.where(is_here, num_keys % page_size, 0)
