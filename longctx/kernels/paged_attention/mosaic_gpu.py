"""Paged attention on Hopper GPUs: tiles of rows sorted by sequence; the kernel looks up and reads the pages."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.bits import from_bits
from longctx.kernels.fp8 import BITS, E4M3
from longctx.kernels.mosaic_gpu.device import Device
from longctx.kernels.mosaic_gpu.forward import ForwardConfig, attention_forward, with_positive_scale
from longctx.kernels.mosaic_gpu.keys import Paged
from longctx.kernels.mosaic_gpu.merge import merge_pieces
from longctx.kernels.mosaic_gpu.tile_config import TileConfig
from longctx.kernels.mosaic_gpu.work import Tiles, Work, equal_shares
from longctx.kernels.paged_attention.operands import PagedOperands
from longctx.kernels.paged_attention.tiles import count_leading

# Shared memory has tiles of 8 rows, so TMA copies rows from a multiple of 8 on: from elsewhere some arrive as zeros.
_ALIGNMENT = 8


class MosaicGpuPlan(NamedTuple):
    """Tables that follow from shapes and metadata alone, and are the same in all layers.

    The kernel's rows are those of q with the heads of a group folded in, sorted by sequence. Each sequence begins at a
    multiple of 8; the rows between repeat its last one.
    """

    token: Array  # [rows], the row of q and the head of its group that a row of the kernel takes
    head: Array  # [rows]
    seen: tuple[Array, ...]  # [tiles, block_q], the last slot that each row sees and, where there is a limit, the first
    work: Work
    place: Array  # [T, G], tile * block_q + row: where the rows of a row of q are; -1: it is padding


def mosaic_gpu_paged_attention(
    operands: PagedOperands, rule: AttentionRule, plan: MosaicGpuPlan, out_dtype: DTypeLike = jnp.float32
) -> tuple[Array, Array]:
    """As `xla_paged_attention`, for 16-bit q and the head and page sizes that `selection.unsupported_reason` allows."""
    q, k_pages, v_pages = operands[:3]
    (length, heads, head_size), kv_heads = q.shape, k_pages.shape[2]
    q, scale = with_positive_scale(q, rule.scale)
    rows = q.reshape(length, kv_heads, heads // kv_heads, head_size)[plan.token, :, plan.head][None]
    fp8 = operands.k_scale is not None
    k_pages, v_pages = (lax.bitcast_convert_type(x, E4M3) if fp8 else from_bits(x, q.dtype) for x in (k_pages, v_pages))
    scales = operands.k_scale, operands.v_scale
    pages = Paged(k_pages, v_pages, operands.page_table, operands.first_page[None], *scales)
    config = ForwardConfig(TileConfig.choose(head_size, plan.seen[0].shape[1], fp8), scale, split=True)
    out, lse = attention_forward(rows, pages, plan.seen, plan.work, config, jnp.float32)
    assert plan.work.pieces is not None
    return merge_pieces(out, lse, plan.work.pieces, plan.place, heads, out_dtype)


def plan_mosaic_gpu(
    operands: PagedOperands,
    before: int | None = None,
    max_rows_per_sequence: int | None = None,
    reserved_multiprocessors: int = 0,
) -> MosaicGpuPlan:
    """Make tiles, each of rows of one sequence, all but its last tile full, and assign them to workers.

    There is a worker on each multiprocessor that is not reserved. A row sees no key more than `before` tokens before
    it; None: any.

    Tiles are no larger than `max_rows_per_sequence` rows of q need. A sequence with more rows has more tiles.
    """
    (length, heads, head_size), kv_heads = operands.q.shape, operands.k_pages.shape[2]
    most = length if max_rows_per_sequence is None else min(length, max_rows_per_sequence)
    fp8 = operands.k_pages.dtype in (BITS, E4M3)
    tile_config = TileConfig.choose(head_size, most * heads // kv_heads, fp8)
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
    stop_row = jnp.cumsum(_round_up(num_rows, _ALIGNMENT), dtype=jnp.int32)
    first_row = stop_row - _round_up(num_rows, _ALIGNMENT)
    num_tiles = -(-num_rows // tile_config.block_q)
    stop_tile = jnp.cumsum(num_tiles, dtype=jnp.int32)
    first_tile = stop_tile - num_tiles

    row = jnp.arange(max_rows(length, group, num_sequences), dtype=jnp.int32)
    of = _index_below(stop_row, row)
    within = jnp.clip(row - first_row[of], 0, jnp.maximum(num_rows[of] - 1, 0))
    token, head = order[jnp.minimum(first_token[of] + within // group, length - 1)], within % group
    seen = jnp.where(real, _count_slots(operands, operands.q_positions, operands.q_sequence), 0)

    tile = jnp.arange(length * group // tile_config.block_q + min(length, num_sequences), dtype=jnp.int32)
    slots = operands.page_table.shape[1] * operands.k_pages.shape[1]
    if kv_heads * tile.size * -(-slots // tile_config.block_kv) > jnp.iinfo(jnp.int32).max:
        raise NotImplementedError(
            f"implementation 'mosaic_gpu' counts blocks in int32, which {length} rows of q with {heads} heads over "
            f"{slots} slots of a page table exceed: pass fewer rows at a time"
        )
    of = _index_below(stop_tile, tile)
    used = tile < stop_tile[-1]
    first = first_row[of] + (tile - first_tile[of]) * tile_config.block_q
    # Rows of a tile beyond its own repeat its last row, so that they add no masked blocks.
    of_tile = first[:, None] + jnp.arange(tile_config.block_q, dtype=jnp.int32)[None]
    of_tile = jnp.clip(of_tile, 0, (first_row + jnp.maximum(num_rows, 1))[of][:, None] - 1)
    tile_seen = jnp.where(used[:, None], seen[token][of_tile], 0)
    rows_seen: tuple[Array, ...] = (tile_seen - 1,)
    start = full_start = jnp.zeros_like(tile)
    first_seen = operands.first_seen(before)
    if first_seen is not None:
        unseen = _count_slots(operands, first_seen - 1, operands.q_sequence)
        tile_unseen = jnp.where(used[:, None], jnp.where(real, unseen, 0)[token][of_tile], 0)
        rows_seen += (tile_unseen,)
        start = jnp.min(tile_unseen, 1) // tile_config.block_kv
        full_start = -(-jnp.max(tile_unseen, 1) // tile_config.block_kv)
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
        full_stop=jnp.min(tile_seen, 1) // tile_config.block_kv,
        stop=-(-jnp.max(tile_seen, 1) // tile_config.block_kv),
    )
    if first_seen is not None:
        stop = jnp.maximum(tiles.stop, start)
        full_start = jnp.clip(full_start, start, stop)
        tiles = tiles._replace(full_start=full_start, full_stop=jnp.clip(tiles.full_stop, full_start, stop), stop=stop)
    work = equal_shares(tiles, kv_heads, Device.target().unreserved(reserved_multiprocessors))
    sequence = jnp.minimum(sequence, num_sequences - 1)
    within = (place - first_token[sequence])[:, None] * group + jnp.arange(group, dtype=jnp.int32)[None]
    place = first_tile[sequence][:, None] * tile_config.block_q + within
    return MosaicGpuPlan(token, head, rows_seen, work, jnp.where(real[:, None], place, -1))


def max_rows(length: int, group: int, num_sequences: int) -> int:
    """Most rows of the kernel for `length` rows of q: each sequence is padded to whole tiles of shared memory."""
    padding = _ALIGNMENT - math.gcd(group, _ALIGNMENT)
    return _round_up(length * group + padding * min(length, num_sequences), _ALIGNMENT)


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
