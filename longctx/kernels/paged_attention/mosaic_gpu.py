"""Paged attention on Hopper GPUs: tiles of rows sorted by sequence; the kernel looks up and reads the pages."""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.bits import from_bits
from longctx.kernels.device import Device
from longctx.kernels.fp8 import BITS, E4M3
from longctx.kernels.mosaic_gpu.forward import ForwardConfig, attention_forward, with_positive_scale
from longctx.kernels.mosaic_gpu.keys import Paged
from longctx.kernels.mosaic_gpu.merge import merge_pieces
from longctx.kernels.mosaic_gpu.tile_config import TileConfig
from longctx.kernels.paged_attention.operands import PagedOperands
from longctx.kernels.paged_attention.sorted_tiles import SortedTiles, sort_tiles

# Shared memory has tiles of 8 rows, so TMA copies rows from a multiple of 8 on: from elsewhere some arrive as zeros.
ALIGNMENT = 8


def mosaic_gpu_paged_attention(
    operands: PagedOperands, rule: AttentionRule, plan: SortedTiles, out_dtype: DTypeLike = jnp.float32
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
) -> SortedTiles:
    """Make tiles for a worker on each multiprocessor that is not reserved (`sort_tiles`).

    Tiles are no larger than `max_rows_per_sequence` rows of q need. A sequence with more rows has more tiles.
    """
    (length, heads, head_size), kv_heads = operands.q.shape, operands.k_pages.shape[2]
    most = length if max_rows_per_sequence is None else min(length, max_rows_per_sequence)
    fp8 = operands.k_pages.dtype in (BITS, E4M3)
    config = TileConfig.choose(head_size, most * heads // kv_heads, fp8)
    workers = Device.target().unreserved(reserved_multiprocessors)
    return sort_tiles(operands, before, config.block_q, config.block_kv, workers, "mosaic_gpu", ALIGNMENT)
