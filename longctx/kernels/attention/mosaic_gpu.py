"""Attention on Hopper GPUs: prepares tiles for the kernel and merges its results."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from longctx.kernels.attention.mask import (
    BlockRange,
    Tokens,
    Visible,
    block_range,
    summarise,
    summarise_visible,
)
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.device import Device
from longctx.kernels.merge import merge_state
from longctx.kernels.mosaic_gpu.forward import ForwardConfig, attention_forward, with_positive_scale
from longctx.kernels.mosaic_gpu.keys import Contiguous
from longctx.kernels.mosaic_gpu.merge import merge_pieces
from longctx.kernels.mosaic_gpu.tile_config import TileConfig
from longctx.kernels.work import Tiles, Work, equal_shares, whole_items

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
    rows: Visible | Tokens,
    others: Visible | Tokens,
    tile_config: TileConfig,
    shared_rows: bool = False,
    shared_keys: bool = False,
) -> tuple[Tiles, tuple[Array, ...], Array]:
    """Make tiles of the rows of a batch, whose sequences may share rows or others.

    One side are the queries, which see some positions (`Visible`), and the other one the keys (`Tokens`).

    Returns:
      The tiles; the rows' arrays, `[tiles, rows]` each; and those of the others, `[arrays, Bm, S in whole blocks]`.
      Arrays of queries are the last position seen, the segment, and where there is a limit, or the queries are the
      others, the first position seen. Those of keys are the position and the segment.
    """
    for x in jax.tree.leaves((rows, others)):
        if x.dtype != jnp.int32:
            raise TypeError(
                f'positions and segment ids must be int32 where they are traced for "mosaic_gpu", got {x.dtype}: '
                'convert them, x.astype("int32"), if their values fit, or take implementation="xla"'
            )
    # Positions may be shared by a batch whose segments are not, and the other way round.
    rows, others = _broadcast_batch(rows), _broadcast_batch(others)
    num_rows, num_others = rows.segments.shape[1], others.segments.shape[1]
    per_entry = -(-num_rows // tile_config.block_q)
    # Rows of a tile beyond the end repeat its last row, so that they add no masked blocks.
    padding = ((0, 0), (0, per_entry * tile_config.block_q - num_rows))
    rows = jax.tree.map(lambda x: jnp.pad(x, padding, mode="edge"), rows)
    padding = ((0, 0), (0, -num_others % tile_config.block_kv))
    segments = jnp.pad(others.segments, padding, constant_values=-1)
    others = jax.tree.map(lambda x: jnp.pad(x, padding), others)._replace(segments=segments)

    row_blocks, other_blocks = _summarise(rows, tile_config.block_q), _summarise(others, tile_config.block_kv)
    entries = max(len(rows.segments), len(segments))
    num_blocks = other_blocks.uniform.shape[1]
    row_blocks, other_blocks = (
        jax.tree.map(lambda x: jnp.broadcast_to(x, (entries, x.shape[1])), x) for x in (row_blocks, other_blocks)
    )

    def range_of(row_block: Any, other_blocks: Any) -> BlockRange:
        sides = (row_block, other_blocks) if isinstance(rows, Visible) else (other_blocks, row_block)
        return block_range(*sides, num_blocks)

    ranges = jax.vmap(jax.vmap(range_of, (0, None)))(row_blocks, other_blocks)

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
        kv_tokens=entry if len(segments) > 1 else none,
        start=of_tiles(ranges.start),
        full_start=of_tiles(ranges.full_start),
        full_stop=of_tiles(ranges.full_stop),
        stop=of_tiles(ranges.stop),
    )
    of_rows = tuple(of_tiles(x.reshape(len(x), per_entry, tile_config.block_q)) for x in _mask_arrays(rows, -1))
    of_others = _mask_arrays(others, -2)
    if isinstance(others, Visible) and len(of_others) == 2:
        of_others += (jnp.full_like(segments, jnp.iinfo(jnp.int32).min),)
    return tiles, of_rows, jnp.stack(of_others)


def _summarise(tokens: Visible | Tokens, block: int) -> Any:
    return summarise_visible(tokens, block) if isinstance(tokens, Visible) else summarise(tokens, block)


def _mask_arrays(tokens: Visible | Tokens, padding: int) -> tuple[Array, ...]:
    """The arrays of a mask's side, of which padding has a segment that the other side has nowhere."""
    segments = jnp.where(tokens.segments < 0, padding, tokens.segments)
    if isinstance(tokens, Tokens):
        return tokens.positions, segments
    last = jnp.full_like(segments, jnp.iinfo(jnp.int32).max) if tokens.last is None else tokens.last
    return last, segments, *(() if tokens.first is None else (tokens.first,))


def _broadcast_batch(tokens: Any) -> Any:
    """Broadcast the arrays of tokens, of which some may be the same for the whole batch."""
    batch = max(len(x) for x in jax.tree.leaves(tokens))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, x.shape[1])), tokens)
