"""Paged attention in Triton, for NVIDIA GPUs since Ampere: tiles of rows sorted by sequence, and split over workers."""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.bits import from_bits
from longctx.kernels.device import Device
from longctx.kernels.fp8 import BITS, E4M3
from longctx.kernels.paged_attention.operands import PagedOperands
from longctx.kernels.paged_attention.sorted_tiles import SortedTiles, sort_tiles
from longctx.kernels.triton.merge import merge_pieces
from longctx.kernels.triton.paged import Pages, Rows, paged_attention
from longctx.kernels.triton.scores import ScoreConfig
from longctx.kernels.triton.tile_config import TileConfig

# Programs of the interpreter, which runs one after the other.
_INTERPRETED_WORKERS = 3


def triton_paged_attention(
    operands: PagedOperands, rule: AttentionRule, plan: SortedTiles, out_dtype: DTypeLike = jnp.float32
) -> tuple[Array, Array]:
    """As `xla_paged_attention`, for what `selection.unsupported_reason` allows."""
    q, k_pages, v_pages = operands[:3]
    heads, head_size = q.shape[1:]
    page_size, is_fp8 = k_pages.shape[1], operands.k_scale is not None
    slots = (_as_pairs(x) if is_fp8 else from_bits(x, q.dtype) for x in (k_pages, v_pages))
    k, v = (x.reshape(-1, *x.shape[2:]) for x in slots)
    pages = Pages(k, v, operands.page_table, operands.first_page[None], operands.k_scale, operands.v_scale)
    config = TileConfig.paged(head_size, q.dtype, plan.seen[0].shape[1], is_fp8)
    rows = Rows(plan.token, plan.head, plan.seen)
    out, lse = paged_attention(q, pages, rows, plan.work, config, ScoreConfig(rule.scale, rule.soft_cap), page_size)
    assert plan.work.pieces is not None
    return merge_pieces(out, lse, plan.work.pieces, plan.place, heads, out_dtype)


def plan_triton(
    operands: PagedOperands,
    before: int | None = None,
    max_rows_per_sequence: int | None = None,
    reserved_multiprocessors: int = 0,
) -> SortedTiles:
    """Make tiles for as many workers as the multiprocessors that are not reserved hold (`sort_tiles`).

    Tiles are no larger than `max_rows_per_sequence` rows of q need. A sequence with more rows has more tiles.
    """
    (length, heads, head_size), kv_heads = operands.q.shape, operands.k_pages.shape[2]
    most = length if max_rows_per_sequence is None else min(length, max_rows_per_sequence)
    is_fp8, device = operands.k_pages.dtype in (BITS, E4M3), Device.target()
    config = TileConfig.paged(head_size, operands.q.dtype, most * heads // kv_heads, is_fp8)
    # Of 4 warps, with all registers that a thread can have, two programs fit into a multiprocessor.
    per_multiprocessor = 8 // config.num_warps
    workers = per_multiprocessor * device.unreserved(reserved_multiprocessors)
    workers = workers if device.is_gpu else _INTERPRETED_WORKERS
    return sort_tiles(operands, before, config.block_q, config.block_kv, workers, "triton")


def _as_pairs(pages: Array) -> Array:
    """Pages of uint8 as uint16, each of two neighbours in a row."""
    return lax.bitcast_convert_type(pages.reshape(*pages.shape[:-1], -1, 2), jnp.uint16)
