"""Attention on Hopper GPUs: prepares tiles for the kernel and merges its results."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from longctx.kernels.attention.mask import Tokens, block_range, summarise
from longctx.kernels.merge import merge_state
from longctx.kernels.mosaic_gpu.device import Device
from longctx.kernels.mosaic_gpu.forward import ForwardConfig, attention_forward, with_positive_scale
from longctx.kernels.mosaic_gpu.keys import Contiguous
from longctx.kernels.mosaic_gpu.merge import merge_pieces
from longctx.kernels.mosaic_gpu.tile_config import TileConfig
from longctx.kernels.mosaic_gpu.work import Tiles, equal_shares, one_worker_per_tile

# With fewer tokens than this, the query heads of a KV head share tiles. With more, tiles are full without it, and the
# queries need no transposition.
_FOLD_BELOW = 512
# With this many tiles per multiprocessor the load is even without splitting tiles.
_EVEN = 4


def mosaic_gpu_attention(
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    causal: bool,
    scale: float,
    state: tuple[Array, Array] | None = None,
    out_dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Array]:
    """As `xla_attention`, for 16-bit q, k and v and the head sizes that `selection.unsupported_reason` allows."""
    batch, length, heads, head_size = q.shape
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    folded = group > 1 and length < _FOLD_BELOW
    q, scale = with_positive_scale(q, scale)
    if folded:
        q = jnp.swapaxes(q.reshape(batch, length, kv_heads, group, head_size), 2, 3)
        q = q.reshape(batch, length * group, kv_heads, head_size)
        queries = Tokens(*(jnp.repeat(x, group, axis=1) for x in queries))
    num_rows, row_heads = q.shape[1:3]
    tile_config = TileConfig.choose(head_size, num_rows)
    tiles, rows, tokens = make_tiles(batch, queries, keys, causal, tile_config, shared_keys=k.shape[-4] < batch)
    num_tiles, num_sms = rows[0].shape[0], Device.target().num_multiprocessors
    # Tiles are even only within one sequence: those of a batch may differ in length.
    split = num_rows <= tile_config.block_q or num_tiles * row_heads < _EVEN * num_sms
    work = equal_shares(tiles, max(1, num_sms // row_heads)) if split else one_worker_per_tile(tiles)
    config = ForwardConfig(tile_config, scale, split)
    wide = jnp.float32 if split or state is not None else out_dtype
    out, lse = attention_forward(q, Contiguous(k, v, tokens), rows, work, config, wide)
    if split:
        out, lse = merge_pieces(out, lse, work)
        seen = work.num_pieces > 0
        out = jnp.where(seen[:, None, None, None], out, 0)
        lse = jnp.where(seen[:, None], lse, -jnp.inf)
    out = out.reshape(batch, -1, row_heads, head_size)[:, :num_rows]
    lse = jnp.moveaxis(lse.reshape(row_heads, batch, -1)[:, :, :num_rows], 0, 2)
    if folded:
        out = jnp.swapaxes(out.reshape(batch, length, group, kv_heads, head_size), 2, 3)
        lse = jnp.swapaxes(lse.reshape(batch, length, group, kv_heads), 2, 3)
    out, lse = out.reshape(batch, length, heads, head_size), lse.reshape(batch, length, heads)
    return (out, lse) if state is None else merge_state(*state, out, lse)


def make_tiles(
    batch: int,
    queries: Tokens,
    keys: Tokens,
    causal: bool,
    tile_config: TileConfig,
    shared_rows: bool = False,
    shared_keys: bool = False,
) -> tuple[Tiles, tuple[Array, ...], Array]:
    """Make tiles of the rows of a batch, whose sequences may share rows or keys.

    Returns:
      The tiles; (last position seen, segment) of their rows, `[tiles, rows]` each; and positions and segments of the
      keys, `[2, Bm, S in whole blocks]`.
    """
    num_rows = queries.positions.shape[1]
    per_entry = -(-num_rows // tile_config.block_q)
    # Rows of a tile beyond the end repeat its last row, so that they add no masked blocks.
    padding = ((0, 0), (0, per_entry * tile_config.block_q - num_rows))
    queries = Tokens(*(jnp.pad(x, padding, mode="edge") for x in queries))
    padding = ((0, 0), (0, -keys.positions.shape[1] % tile_config.block_kv))
    keys = Tokens(jnp.pad(keys.positions, padding), jnp.pad(keys.segments, padding, constant_values=-1))

    q_blocks, kv_blocks = summarise(queries, tile_config.block_q), summarise(keys, tile_config.block_kv)
    entries = max(len(queries.positions), len(keys.positions))
    num_blocks = kv_blocks.uniform.shape[1]
    q_blocks, kv_blocks = (
        jax.tree.map(lambda x: jnp.broadcast_to(x, (entries, x.shape[1])), blocks) for blocks in (q_blocks, kv_blocks)
    )
    per_tile = jax.vmap(lambda a, b: block_range(a, b, causal, num_blocks), (0, None))
    ranges = jax.vmap(per_tile)(q_blocks, kv_blocks)

    def of_tiles(x: Array) -> Array:
        """`[1 or B, tiles per sequence, ...]` -> `[tiles, ...]`, over the whole batch."""
        return jnp.broadcast_to(x, (batch, *x.shape[1:])).reshape(batch * per_entry, *x.shape[2:])

    number = jnp.arange(batch * per_entry, dtype=jnp.int32)
    entry = number // per_entry
    none = jnp.zeros_like(entry)
    tiles = Tiles(
        q_batch=none if shared_rows else entry,
        q_row=number % per_entry * tile_config.block_q,
        kv=none if shared_keys else entry,
        kv_tokens=entry if len(keys.positions) > 1 else none,
        start=of_tiles(ranges.start),
        full_start=of_tiles(ranges.full_start),
        full_stop=of_tiles(ranges.full_stop),
        stop=of_tiles(ranges.stop),
    )
    last = queries.positions if causal else jnp.full_like(queries.positions, jnp.iinfo(jnp.int32).max)
    # Padding has segment -1 in rows and -2 in keys, so that it never matches.
    segments = jnp.where(queries.segments < 0, -1, queries.segments)
    rows = tuple(of_tiles(x.reshape(len(x), per_entry, tile_config.block_q)) for x in (last, segments))
    tokens = jnp.stack([keys.positions, jnp.where(keys.segments < 0, -2, keys.segments)])
    return tiles, rows, tokens
