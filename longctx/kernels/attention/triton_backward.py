"""Gradients of attention on NVIDIA GPUs since Ampere: one kernel from the queries' side, one from the keys'.

From a tile of queries the first computes d_q, over the keys that they see. From a block of keys the second computes d_k
and d_v, over the tiles of queries that see them. So each result is summed by one program, without atomics and in a
fixed order.

    weights = exp(scores - lse), d_scores = weights * (d_out @ v.T + row_terms)
    d_q += d_scores @ k, d_k += d_scores.T @ q, d_v += weights.T @ d_out

Source: FlashAttention-2 (Dao 2023), algorithm 2; two passes in place of its atomics.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from longctx.kernels.attention.mask import BlockRange, Tokens
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.attention.triton import (
    Rows,
    RowTiles,
    Seen,
    entry_of,
    ranges_of,
    sum_products,
    sweep,
    visible_keys,
    whole_blocks,
)
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.triton import adapter
from longctx.kernels.triton.adapter import load, load_rows, product, store_rows
from longctx.kernels.triton.scores import LOG2E, ScoreConfig
from longctx.kernels.triton.tile_config import TileConfig, pieces_of


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Static arguments of a kernel."""

    tiles: TileConfig
    rows: RowTiles
    scores: ScoreConfig
    group: int
    lengths: tuple[int, int]  # T and S
    sizes: tuple[int, int]  # H and Hv
    halves: tuple[tuple[int, ...], tuple[int, ...]]  # index of k, and of v, in an array that holds both
    has_first: bool
    has_last: bool


def triton_backward(
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    rule: AttentionRule,
    lse: Array,
    row_terms: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """As `xla_backward`, for the cases that `selection` allows. Results are float32 and are summed in float32.

    Factors of products have the dtype of q: where that has 16 bits, d_out, the weights and the gradients of scores are
    rounded to it, and in float16 must be within 65504.
    """
    batch, length, heads, head_size = q.shape
    kv_length, kv_heads = k.shape[-3:-1]
    group, value_size = heads // kv_heads, v.shape[-1]
    visible = rule.visible(queries)
    # Every weight of an empty row is exp(score - inf) = 0.
    stats = jnp.where(lse == -jnp.inf, jnp.inf, lse), row_terms
    operands = q, k, v, d_out.astype(q.dtype), *stats

    def run(from_keys: bool) -> list[Array]:
        tiles = TileConfig.backward(head_size, value_size, q.dtype, length * group, from_keys)
        rows = RowTiles.of(length, group, tiles.block_q)
        seen = whole_blocks(visible, keys, rows.tokens, tiles.block_kv)
        config = BackwardConfig(
            tiles=tiles,
            rows=rows,
            scores=ScoreConfig(rule.scale, rule.soft_cap),
            group=group,
            lengths=(length, kv_length),
            sizes=(head_size, value_size),
            halves=((0,), (1,)) if k.ndim == 5 else ((), ()),
            has_first=seen.first is not None,
            has_last=seen.last is not None,
        )
        ranges = ranges_of(seen, rows.tokens, tiles.block_kv, from_keys)
        return _attention_backward(config, from_keys, operands, ranges, [x for x in seen if x is not None])

    (d_q,), (d_k, d_v) = run(from_keys=False), run(from_keys=True)
    if k.shape[-4] < batch:
        d_k, d_v = (jnp.sum(x, 0, keepdims=True) for x in (d_k, d_v))
    return d_q, d_k, d_v


@kernel_jit("config", "from_keys")
def _attention_backward(
    config: BackwardConfig, from_keys: bool, operands: Sequence[Array], ranges: Array, seen: Sequence[Array]
) -> list[Array]:
    """d_q `[B, T, N, H]`, or d_k `[B, S, K, H]` and d_v `[B, S, K, Hv]`."""
    q, k, _, *_ = operands
    batch, (kv_length, kv_heads) = q.shape[0], k.shape[-3:-1]
    of_keys = [((batch, kv_length, kv_heads, size), jnp.float32) for size in config.sizes]
    num_blocks = -(-kv_length // config.tiles.block_kv)
    run = adapter.kernel(
        functools.partial(_kernel_of_keys if from_keys else _kernel_of_queries, config),
        of_keys if from_keys else [(q.shape, jnp.float32)],
        like=q,
        grid=(num_blocks, kv_heads, batch) if from_keys else (config.rows.num, kv_heads * config.rows.parts, batch),
        config=config.tiles,
        name="attention_of_keys" if from_keys else "attention_of_queries",
    )
    return run(*operands, ranges, *seen)


def _unpack(config: BackwardConfig, refs: Sequence[Any]) -> tuple[Sequence[Any], Any, Seen, Sequence[Any]]:
    """The references to operands, ranges, what the mask needs, and results."""
    operands, (ranges, *rest) = refs[:6], refs[6:]
    first = rest.pop(0) if config.has_first else None
    last = rest.pop(0) if config.has_last else None
    return operands, ranges, Seen(first, last, *rest[:3]), rest[3:]


def _kernel_of_queries(config: BackwardConfig, *refs: Any) -> None:
    operands, ranges, seen, (d_q_ref,) = _unpack(config, refs)
    q_ref, k_ref, v_ref, d_out_ref, lse_ref, terms_ref = operands
    # Long tiles begin first: in most layouts the last queries see most.
    tile = config.rows.num - 1 - pl.program_id(0)
    kv_head, part = (op(pl.program_id(1), jnp.int32(config.rows.parts)) for op in (lax.div, lax.rem))
    entry = pl.program_id(2)
    key_pieces, value_pieces = (pieces_of(size) for size in config.sizes)
    block_kv, (length, kv_length) = config.tiles.block_kv, config.lengths
    rows = Rows.of(config.rows, config.tiles.block_q, config.group, length, tile, kv_head, part)
    at: dict[str, Any] = {"rows": rows.loaded_token[:, None], "head": rows.loaded_head[:, None], "mask": None}
    q, d_out = (load_rows(x, entry, pieces=y, **at) for x, y in ((q_ref, key_pieces), (d_out_ref, value_pieces)))
    lse, terms = (load(x, entry, rows.loaded_token, rows.loaded_head) for x in (lse_ref, terms_ref))
    visible = tuple(None if x is None else load(x, entry_of(x, entry), rows.loaded_token) for x in seen[:3])
    kv_entry = entry if k_ref.shape[-4] > 1 else 0

    def step(block: Array, d_q: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        key = block * block_kv + lax.iota(jnp.int32, block_kv)
        exists = (key < kv_length)[:, None] if masked and kv_length % block_kv else None
        at: dict[str, Any] = {"rows": key[:, None], "head": kv_head, "mask": exists}
        k = load_rows(k_ref, *config.halves[0], kv_entry, pieces=key_pieces, **at)
        v = load_rows(v_ref, *config.halves[1], kv_entry, pieces=value_pieces, **at)
        seen_keys = visible_keys(seen, visible, entry, key) if masked else None
        natural, weights = _weights(config, sum_products(q, k), lse[:, None], seen_keys)
        d_scores = weights * (sum_products(d_out, v) + terms[:, None]) * config.scores.slope(natural)
        rounded = d_scores.astype(q_ref.dtype)
        return tuple(x + product(rounded, y) for x, y in zip(d_q, k, strict=True))

    found = BlockRange(*(load(ranges, entry_of(ranges, entry), tile, i) for i in range(4)))
    zeros = tuple(jnp.zeros((config.tiles.block_q, piece.size), jnp.float32) for piece in key_pieces)
    d_q = [x * config.scores.scale for x in sweep(found, step, zeros)]
    own = None if rows.own is None else rows.own[:, None]
    at = {"rows": rows.token[:, None], "head": rows.head[:, None], "mask": own}
    store_rows(d_q_ref, entry, pieces=key_pieces, values=d_q, **at)


def _kernel_of_keys(config: BackwardConfig, *refs: Any) -> None:
    operands, ranges, seen, (d_k_ref, d_v_ref) = _unpack(config, refs)
    q_ref, k_ref, v_ref, d_out_ref, lse_ref, terms_ref = operands
    # Long blocks begin first: in most layouts most queries see the first keys.
    block, kv_head, entry = (pl.program_id(axis) for axis in range(3))
    key_pieces, value_pieces = (pieces_of(size) for size in config.sizes)
    block_kv, (length, kv_length), parts = config.tiles.block_kv, config.lengths, config.rows.parts
    key = block * block_kv + lax.iota(jnp.int32, block_kv)
    exists = (key < kv_length)[:, None] if kv_length % block_kv else None
    kv_entry = entry if k_ref.shape[-4] > 1 else 0
    at_keys: dict[str, Any] = {"rows": key[:, None], "head": kv_head, "mask": exists}
    k = load_rows(k_ref, *config.halves[0], kv_entry, pieces=key_pieces, **at_keys)
    v = load_rows(v_ref, *config.halves[1], kv_entry, pieces=value_pieces, **at_keys)

    def step(number: Array, sums: tuple[Any, Any], masked: bool) -> tuple[Any, Any]:
        tile, part = (
            (number, jnp.int32(0)) if parts == 1 else (op(number, jnp.int32(parts)) for op in (lax.div, lax.rem))
        )
        rows = Rows.of(config.rows, config.tiles.block_q, config.group, length, tile, kv_head, part)
        at: dict[str, Any] = {"rows": rows.loaded_token[:, None], "head": rows.loaded_head[:, None], "mask": None}
        q, d_out = (load_rows(x, entry, pieces=y, **at) for x, y in ((q_ref, key_pieces), (d_out_ref, value_pieces)))
        lse, terms = (load(x, entry, rows.loaded_token, rows.loaded_head) for x in (lse_ref, terms_ref))
        lse = lse if rows.own is None else jnp.where(rows.own, lse, jnp.inf)
        seen_by = None
        if masked:
            visible = tuple(None if x is None else load(x, entry_of(x, entry), rows.loaded_token) for x in seen[:3])
            seen_by = visible_keys(seen, visible, entry, key, transposed=True)
        natural, weights = _weights(config, sum_products(k, q), lse[None, :], seen_by)
        d_scores = weights * (sum_products(v, d_out) + terms[None, :]) * config.scores.slope(natural)
        d_k, d_v = (
            tuple(x + product(factor.astype(q_ref.dtype), y) for x, y in zip(of, others, strict=True))
            for of, factor, others in ((sums[0], d_scores, q), (sums[1], weights, d_out))
        )
        return d_k, d_v

    found = (load(ranges, entry_of(ranges, entry), block, i) * parts for i in range(4))
    zeros = (
        tuple(jnp.zeros((block_kv, piece.size), jnp.float32) for piece in pieces)
        for pieces in (key_pieces, value_pieces)
    )
    d_k, d_v = sweep(BlockRange(*found), step, tuple(zeros))
    store_rows(d_k_ref, entry, pieces=key_pieces, values=[x * config.scores.scale for x in d_k], **at_keys)
    store_rows(d_v_ref, entry, pieces=value_pieces, values=d_v, **at_keys)


def _weights(config: BackwardConfig, products: Array, lse: Array, seen: Array | None) -> tuple[Array, Array]:
    """The natural scores of products, and their weights, 0 where nothing is seen.

    The minimum is for scores so large that their rounding exceeds what they differ by, as in `exp_below`.
    """
    natural = config.scores.natural(products)
    weights = jnp.exp2((jnp.minimum(natural, lse) - lse) * LOG2E)
    return natural, weights if seen is None else jnp.where(seen, weights, 0.0)
