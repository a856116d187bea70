"""Paged attention with an online softmax in plain XLA. It reads pages in place and gathers no whole sequence.

Tiles (`tiles.py`) come in a few sizes. For each size one loop runs over its tiles. For each tile two loops run over
blocks of its pages: the first without a mask, over pages of which every row sees every key; the second with a mask,
over the rest.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.kernels.attention.online_softmax import OnlineSoftmax, dot
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.bits import from_bits
from longctx.kernels.fp8_rows import dequantize_rows
from longctx.kernels.operand_dtype import operand_dtype, wide_dtype
from longctx.kernels.paged_attention.operands import PagedOperands
from longctx.kernels.paged_attention.tiles import Tiles, partition_rows

# Rows of a tile, with the query heads of one KV head folded in, and keys of a block, chosen by measurement on CPU
# (docs/paged_attention.md).
_ROWS = 1024
_SIZES = (1, 16, 64, 256)
_SCORES = _ROWS * 256
_MAX_BLOCK = 512
_MASKED_BLOCK = 128  # keys, with few rows
# With at most this many rows over all heads, one product serves all KV heads of a block.
_FEW_ROWS = 256

# Slice indices must share a type; a plain 0 is an int64 when x64 is on.
_ZERO = np.int32(0)


def plan_xla(operands: PagedOperands, before: int | None = None) -> list[Tiles]:
    """Return the tiles of each size; `before`: how many tokens before a row it sees."""
    num_rows, heads, _ = operands.q.shape
    return partition_rows(operands, tile_sizes(num_rows, heads // operands.k_pages.shape[2]), before)


def xla_paged_attention(operands: PagedOperands, rule: AttentionRule, plan: list[Tiles]) -> tuple[Array, Array]:
    """(out `[T, N, Hv]`, lse `[T, N]`), float32 or wider, for at least one row and one page table entry."""
    q, kv_heads = operands.q, operands.k_pages.shape[2]
    dtype = wide_dtype(q.dtype)
    grouped = q.reshape(q.shape[0], kv_heads, -1, q.shape[2])
    out = jnp.zeros_like(grouped, dtype, shape=(*grouped.shape[:3], operands.v_pages.shape[3]))
    state = out, jnp.full_like(out[..., 0], -jnp.inf)
    for size, tiles in zip(tile_sizes(q.shape[0], grouped.shape[2]), plan, strict=True):
        state = _compute_tiles(operands, grouped, size, tiles, rule, state)
    return state[0].reshape(operands.out_shape), state[1].reshape(q.shape[:2])


def tile_sizes(num_rows: int, group: int) -> tuple[int, ...]:
    """Tile sizes in rows, ascending, for `group` query heads per KV head."""
    largest = min(num_rows, _SIZES[-1], max(1, _ROWS // group))
    return (*(size for size in _SIZES if size < largest), largest)


def pages_per_block(page_size: int, rows: int) -> int:
    """Pages of a block for tiles of `rows` rows, heads folded in."""
    return max(1, min(_MAX_BLOCK, _SCORES // rows) // page_size)


def _compute_tiles(
    operands: PagedOperands, q: Array, size: int, tiles: Tiles, rule: AttentionRule, state: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Compute all tiles of one size; q `[T, K, G, H]`, state `[T, K, G, Hv]` and `[T, K, G]`."""
    num_rows, kv_heads, group, head_size = q.shape
    page_size, num_entries = operands.k_pages.shape[1], operands.page_table.shape[1]
    operand, first_seen = operand_dtype(q.dtype), operands.first_seen(rule.window[0])
    # With few rows the products of single KV heads are too small to be fast, so one product serves all of them.
    heads = kv_heads if size * kv_heads * group <= _FEW_ROWS else 1
    per_block = min(pages_per_block(page_size, size * heads * group), num_entries)
    # Most of a large block would be masked for a short sequence, and with few rows reading it is what takes time.
    per_masked = math.gcd(per_block, max(1, _MASKED_BLOCK // page_size)) if heads > 1 else per_block

    def compute_tile(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        index, head = jnp.divmod(jnp.int32(index), jnp.int32(kv_heads // heads))
        first, stop, sequence, num_full, num_seen = (x[index] for x in tiles[1:6])
        start = jnp.minimum(first, num_rows - size)
        rows = start + jnp.arange(size, dtype=jnp.int32)
        own = (rows >= first) & (rows < stop)
        positions = lax.dynamic_slice(operands.q_positions, (start,), (size,))
        last_seen = jnp.minimum(positions, operands.kv_lengths[sequence] - 1)
        at = (start, head, _ZERO, _ZERO)
        shape = (size, heads, group, state[0].shape[3])
        q_rows = _to_block_diagonal(lax.dynamic_slice(q, at, (*shape[:3], head_size))).astype(operand)

        def block(number: Array, softmax: OnlineSoftmax, num_pages: int, masked: bool) -> OnlineSoftmax:
            entry = number * num_pages + jnp.arange(num_pages, dtype=jnp.int32)
            in_use = entry < num_seen
            if masked:
                entry = jnp.minimum(entry, num_seen - 1)
            pages = operands.first_page + operands.page_table[sequence, entry]
            k_block = _block(operands.k_pages, operands.k_scale, pages, head, heads, q.dtype, operand)
            v_block = _block(operands.v_pages, operands.v_scale, pages, head, heads, q.dtype, operand)
            scores = rule.scores(dot(q_rows, k_block.T))
            if not masked:
                return softmax.absorb(scores, v_block)
            page = entry if operands.page_index is None else operands.page_index[sequence, entry]
            key = (page[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None]).reshape(-1)
            written = jnp.repeat(in_use, page_size) & (key < operands.kv_lengths[sequence])
            seen = (key[None] <= last_seen[:, None]) & written[None]
            if first_seen is not None:
                seen &= key[None] >= lax.dynamic_slice(first_seen, (start,), (size,))[:, None]
            # A slot never written may hold NaN, which a weight of 0 would not remove.
            v_block = jnp.where(written[:, None], v_block, 0)
            return softmax.absorb(jnp.where(jnp.repeat(seen, heads * group, axis=0), scores, -jnp.inf), v_block)

        num_full = num_full // per_block
        first_full: Any = _ZERO
        num_before: Any = _ZERO
        first_masked, num_blocks = num_full * (per_block // per_masked), (num_seen + per_masked - 1) // per_masked
        if tiles.first_entry is not None and tiles.first_full is not None:
            first_block = jnp.minimum(tiles.first_entry[index], num_seen) // per_masked
            first_full = (tiles.first_full[index] + per_block - 1) // per_block
            has_full = first_full < num_full
            first_full, num_full = jnp.where(has_full, first_full, 0), jnp.where(has_full, num_full, 0)
            # Blocks before those that need no mask come first, then those after them.
            num_before = jnp.where(has_full, first_full * (per_block // per_masked) - first_block, 0)
            first_masked = jnp.where(has_full, first_masked - num_before, first_block)
        zeros = jnp.zeros_like(q_rows, state[0].dtype, shape=(q_rows.shape[0], heads * shape[3]))
        softmax = OnlineSoftmax.of_state(zeros, jnp.full_like(zeros[:, 0], -jnp.inf))
        softmax = lax.fori_loop(first_full, num_full, lambda n, x: block(n, x, per_block, False), softmax)

        def masked_block(n: Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
            if tiles.first_entry is not None:
                n = jnp.where(n < first_masked + num_before, n - first_masked + first_block, n)
            return block(n, softmax, per_masked, True)

        softmax = lax.fori_loop(first_masked, num_blocks, masked_block, softmax)
        out, lse = softmax.state()
        new = _from_block_diagonal(out, shape), lse.reshape(shape[:3])
        old = lax.dynamic_slice(state[0], at, shape), lax.dynamic_slice(state[1], at[:3], shape[:3])
        own = own[:, None, None]
        return (
            lax.dynamic_update_slice(state[0], jnp.where(own[..., None], new[0], old[0]), at),
            lax.dynamic_update_slice(state[1], jnp.where(own, new[1], old[1]), at[:3]),
        )

    return lax.fori_loop(_ZERO, tiles.num * (kv_heads // heads), compute_tile, state)


def _block(
    x: Array, scale: Array | None, pages: Array, head: Array, heads: int, kept_as: jnp.dtype, dtype: jnp.dtype
) -> Array:
    """Some pages of x `[pages, page_size, K, H]` -> `[len(pages) * page_size, heads * H]`, sliced, then converted."""
    _, page_size, _, head_size = x.shape
    at = jnp.stack([pages, jnp.full_like(pages, head)], 1)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2, 3), collapsed_slice_dims=(0,), start_index_map=(0, 2))
    block = lax.gather(x, at, numbers, (1, page_size, heads, head_size), mode="promise_in_bounds")
    if scale is None:
        return from_bits(block.reshape(-1, heads * head_size), kept_as).astype(dtype)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    scales = lax.gather(scale, at, numbers, (1, heads, page_size), mode="promise_in_bounds")
    rows = dequantize_rows(block, jnp.swapaxes(scales, 1, 2), kept_as)
    return rows.reshape(-1, heads * head_size).astype(dtype)


def _to_block_diagonal(q: Array) -> Array:
    """Queries `[rows, heads, G, H]` -> `[rows * heads * G, heads * H]`, each at its head's place, zero elsewhere."""
    rows, heads, group, size = q.shape
    spread = jnp.einsum("tkgh,kj->tkgjh", q, jnp.eye(heads, dtype=q.dtype)) if heads > 1 else q
    return spread.reshape(rows * heads * group, heads * size)


def _from_block_diagonal(out: Array, shape: tuple[int, int, int, int]) -> Array:
    """Results of block-diagonal queries -> `[rows, heads, G, H]`, each from its head's place."""
    rows, heads, group, size = shape
    return jnp.einsum("tkgkh->tkgh", out.reshape(rows, heads, group, heads, size))
