"""Attention on Hopper GPUs: prepares tiles for the kernel and merges its results."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from longctx.kernels.attention.mask import Tokens, Visible, block_range, summarise, summarise_visible
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.merge import merge_state
from longctx.kernels.mosaic_gpu.device import Device
from longctx.kernels.mosaic_gpu.forward import ForwardConfig, attention_forward, with_positive_scale
from longctx.kernels.mosaic_gpu.keys import Contiguous
from longctx.kernels.mosaic_gpu.merge import merge_pieces
from longctx.kernels.mosaic_gpu.tile_config import TileConfig
from longctx.kernels.mosaic_gpu.work import Tiles, Work, equal_shares, whole_items

# With fewer tokens than this, the query heads of a KV head share tiles. With more, tiles are full without it, and the
# queries need no transposition.
_FOLD_BELOW = 512


class MosaicGpuPlan(NamedTuple):
    """Tables that follow from shapes and metadata alone."""

    rows: tuple[Array, ...]  # as `make_tiles` returns them
    tokens: Array  # [2, Bm, S in whole blocks], positions and segments of the keys
    work: Work
    place: Array  # [B * T, heads of a tile], tile * block_q + row: where a token's rows are


def mosaic_gpu_attention(
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    rule: AttentionRule,
    plan: MosaicGpuPlan,
    state: tuple[Array, Array] | None = None,
    out_dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Array]:
    """As `xla_attention`, for 16-bit q, k and v and the head sizes that `selection.unsupported_reason` allows.

    `plan` is what `plan_mosaic_gpu` makes of the shapes of q and k, queries, keys and the rule.
    """
    batch, length, heads, head_size = q.shape
    kv_heads, group = k.shape[-2], plan.place.shape[1]
    q, scale = with_positive_scale(q, rule.scale)
    if group > 1:
        q = jnp.swapaxes(q.reshape(batch, length, kv_heads, group, head_size), 2, 3)
        q = q.reshape(batch, length * group, kv_heads, head_size)
    block_q, pieces = plan.rows[0].shape[1], plan.work.pieces
    config = ForwardConfig(TileConfig.choose(head_size, block_q), scale, split=pieces is not None)
    wide = jnp.float32 if state is not None else out_dtype
    contiguous = Contiguous(k, v, plan.tokens)
    if pieces is not None:
        out, lse = attention_forward(q, contiguous, plan.rows, plan.work, config, jnp.float32)
        out, lse = merge_pieces(out, lse, pieces, plan.place, heads, wide)
    else:
        out, lse = attention_forward(q, contiguous, plan.rows, plan.work, config, wide)
        out, lse = (x.reshape(batch, -1, *x.shape[2:])[:, : length * group] for x in (out, lse))
        if group > 1:
            out, lse = (x.reshape(batch, length, group, *x.shape[2:]) for x in (out, lse))
            out, lse = (jnp.swapaxes(x, 2, 3) for x in (out, lse))
    out, lse = out.reshape(batch, length, heads, head_size), lse.reshape(batch, length, heads)
    return (out, lse) if state is None else merge_state(*state, out, lse)


def plan_mosaic_gpu(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    queries: Tokens,
    keys: Tokens,
    rule: AttentionRule,
    reserved_multiprocessors: int = 0,
) -> MosaicGpuPlan:
    """Make tiles of the rows and assign them to workers, one on each multiprocessor that is not reserved."""
    (batch, length, heads, head_size), (kv_batch, kv_length, kv_heads, _) = q_shape, k_shape[-4:]
    group = heads // kv_heads if length < _FOLD_BELOW else 1
    seen = rule.visible(queries)
    if group > 1:
        seen = jax.tree.map(lambda x: jnp.repeat(x, group, axis=1), seen)
    num_rows, row_heads = length * group, heads // group
    num_sms = Device.target().unreserved(reserved_multiprocessors)
    config = TileConfig.choose(head_size, num_rows)
    tiles, rows, tokens = make_tiles(batch, seen, keys, config, shared_keys=kv_batch < batch)
    per_entry = -(-num_rows // config.block_q)
    # Tiles are of like length only within one sequence: those of a batch may differ.
    lengths = _typical_lengths(
        per_entry, -(-kv_length // config.block_kv), seen.last is not None and length <= kv_length
    )
    if num_rows <= config.block_q or _splitting_pays(lengths, batch * row_heads, num_sms):
        work = equal_shares(tiles, row_heads, num_sms)
    else:
        work = whole_items(tiles, row_heads, num_sms)
    entry = jnp.arange(batch, dtype=jnp.int32)[:, None] * (per_entry * config.block_q)
    place = (entry + jnp.arange(num_rows, dtype=jnp.int32)[None]).reshape(batch * length, group)
    return MosaicGpuPlan(rows, tokens, work, place)


def _typical_lengths(num_tiles: int, num_blocks: int, causal: bool) -> np.ndarray:
    """Blocks of each tile, longest first, where the queries are the last tokens of one sequence."""
    shortest = max(1, num_blocks - num_tiles) if causal else num_blocks
    return np.linspace(num_blocks, shortest, num_tiles)


def _splitting_pays(lengths: np.ndarray, heads: int, num_workers: int) -> bool:
    """Whether dividing items equally saves more than merging their pieces costs.

    `lengths` are those of one head's tiles, longest first, and the same for all heads.
    """
    rounds = -(-len(lengths) * heads // num_workers)
    if rounds > 8:
        return False
    lengths = np.repeat(lengths, heads)
    loads = np.pad(lengths, (0, rounds * num_workers - len(lengths))).reshape(rounds, num_workers)
    loads[1::2] = loads[1::2, ::-1]  # snake order, as in `whole_items`
    lost = loads.sum(0).max() - lengths.sum() / num_workers
    # In blocks: a second kernel and the latency of its reads; writing and reading 128 rows of float32 an item.
    return bool(lost > 2 + 3 * len(lengths) / num_workers)


def make_tiles(
    batch: int,
    queries: Visible,
    keys: Tokens,
    tile_config: TileConfig,
    shared_rows: bool = False,
    shared_keys: bool = False,
) -> tuple[Tiles, tuple[Array, ...], Array]:
    """Make tiles of the rows of a batch, whose sequences may share rows or keys.

    Returns:
      The tiles; (last position seen, segment) of their rows, and with a window the first position seen, `[tiles, rows]`
      each; and positions and segments of the keys, `[2, Bm, S in whole blocks]`.
    """
    for x in jax.tree.leaves((queries, keys)):
        if x.dtype != jnp.int32:
            raise TypeError(
                f'positions and segment ids must be int32 where they are traced for "mosaic_gpu", got {x.dtype}: '
                'convert them, x.astype("int32"), if their values fit, or take implementation="xla"'
            )
    # Positions may be shared by a batch whose segments are not, and the other way round.
    queries, keys = (_broadcast_batch(tokens) for tokens in (queries, keys))
    num_rows = queries.segments.shape[1]
    per_entry = -(-num_rows // tile_config.block_q)
    # Rows of a tile beyond the end repeat its last row, so that they add no masked blocks.
    padding = ((0, 0), (0, per_entry * tile_config.block_q - num_rows))
    queries = jax.tree.map(lambda x: jnp.pad(x, padding, mode="edge"), queries)
    padding = ((0, 0), (0, -keys.positions.shape[1] % tile_config.block_kv))
    keys = Tokens(jnp.pad(keys.positions, padding), jnp.pad(keys.segments, padding, constant_values=-1))

    q_blocks, kv_blocks = summarise_visible(queries, tile_config.block_q), summarise(keys, tile_config.block_kv)
    entries = max(len(queries.segments), len(keys.positions))
    num_blocks = kv_blocks.uniform.shape[1]
    q_blocks, kv_blocks = (
        jax.tree.map(lambda x: jnp.broadcast_to(x, (entries, x.shape[1])), blocks) for blocks in (q_blocks, kv_blocks)
    )
    per_tile = jax.vmap(lambda a, b: block_range(a, b, num_blocks), (0, None))
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
    last = jnp.full_like(queries.segments, jnp.iinfo(jnp.int32).max) if queries.last is None else queries.last
    # Padding has segment -1 in rows and -2 in keys, so that it never matches.
    segments = jnp.where(queries.segments < 0, -1, queries.segments)
    rows = last, segments, *(() if queries.first is None else (queries.first,))
    rows = tuple(of_tiles(x.reshape(len(x), per_entry, tile_config.block_q)) for x in rows)
    tokens = jnp.stack([keys.positions, jnp.where(keys.segments < 0, -2, keys.segments)])
    return tiles, rows, tokens


def _broadcast_batch(tokens: Any) -> Any:
    """Broadcast the arrays of tokens, of which some may be the same for the whole batch."""
    batch = max(len(x) for x in jax.tree.leaves(tokens))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, x.shape[1])), tokens)
