"""Attention on NVIDIA GPUs since Ampere, by Pallas' Triton backend.

A program computes a tile of queries: some tokens, and of each the query heads of one KV head that fit, all as rows. Two
loops run over blocks of keys, as in `xla.py`: the first without a mask, the second over the blocks at the edges, with
it. Their ranges follow from positions and segments, outside of the kernel (`mask.block_range`). Where there are fewer
tiles than a GPU has multiprocessors, several programs share the blocks of a tile, and their states are merged.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from longctx.kernels.attention.mask import BlockRange, Tokens, Visible, block_range, summarise, summarise_visible
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.device import Device
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.merge import merge_states
from longctx.kernels.triton import adapter
from longctx.kernels.triton.adapter import load, load_rows, product, store, store_rows
from longctx.kernels.triton.online_softmax import OnlineSoftmax
from longctx.kernels.triton.scores import ScoreConfig
from longctx.kernels.triton.tile_config import TileConfig, pieces_of

# Programs for each multiprocessor, from which on tiles are not divided.
_PROGRAMS = 2
# Blocks of keys that a program has at least.
_FEWEST_BLOCKS = 4


class RowTiles(NamedTuple):
    """Static sizes of the tiles of rows of queries."""

    tokens: int  # of a tile
    members: int  # query heads of one KV head in a tile
    parts: int  # tiles that have the query heads of one KV head
    num: int  # tiles of the tokens of a sequence

    @classmethod
    def of(cls, length: int, group: int, block_q: int) -> "RowTiles":
        members = min(group, block_q)
        tokens = block_q // members
        return cls(tokens, members, -(-group // members), -(-length // tokens))


class Seen(NamedTuple):
    """Arrays that the mask needs, with lengths in whole tiles and blocks, `[Bm, tokens]`.

    Padding has the segment -1 in queries and -2 in keys, so that it never matches.
    """

    first: Array | None
    last: Array | None
    segments: Array
    kv_positions: Array
    kv_segments: Array


class TritonPlan(NamedTuple):
    """Arrays that follow from shapes and metadata alone."""

    seen: Seen
    ranges: Array  # int32 [Bm, tiles, 4]: the fields of `BlockRange`


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Static arguments of the kernel."""

    tiles: TileConfig
    rows: RowTiles
    scores: ScoreConfig
    group: int
    lengths: tuple[int, int]  # T and S
    sizes: tuple[int, int]  # H and Hv
    splits: int
    halves: tuple[tuple[int, ...], tuple[int, ...]]  # index of k, and of v, in an array that holds both


def triton_attention(
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    rule: AttentionRule,
    plan: TritonPlan,
    state: tuple[Array, Array] | None = None,
    out_dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Array]:
    """As `xla_attention`, for the cases that `selection` allows: float32, bfloat16 and float16, without a bias.

    `plan` is what `plan_triton` makes of the shapes and the dtype of q and k, queries, keys and the rule.
    """
    batch, length, heads, head_size = q.shape
    kv_length, kv_heads = k.shape[-3:-1]
    group = heads // kv_heads
    tiles = TileConfig.forward(head_size, v.shape[-1], q.dtype, length * group)
    planned = TileConfig.forward(head_size, head_size, q.dtype, length * group)
    if (tiles.block_q, tiles.block_kv) != (planned.block_q, planned.block_kv):
        # A plan is made without values: with another head size they may take other tiles.
        plan = _plan(tiles, group, length, queries, keys, rule)
    rows = RowTiles.of(length, group, tiles.block_q)
    programs = batch * kv_heads * rows.parts * rows.num
    config = ForwardConfig(
        tiles=tiles,
        rows=rows,
        scores=ScoreConfig(rule.scale, rule.soft_cap),
        group=group,
        lengths=(length, kv_length),
        sizes=(head_size, v.shape[-1]),
        splits=_num_splits(programs, -(-kv_length // tiles.block_kv)),
        halves=((0,), (1,)) if k.ndim == 5 else ((), ()),
    )
    is_final = config.splits == 1 and state is None
    outs, lses = _attention_forward(config, q, k, v, plan, jnp.dtype(out_dtype if is_final else jnp.float32))
    if is_final:
        return outs[0], lses[0]
    if state is not None:
        outs, lses = jnp.concatenate([outs, state[0][None]]), jnp.concatenate([lses, state[1][None]])
    return merge_states(outs, lses)


def plan_triton(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dtype: DTypeLike,
    queries: Tokens,
    keys: Tokens,
    rule: AttentionRule,
) -> TritonPlan:
    """Make tiles of the rows, and find the blocks of keys that each sees."""
    (_, length, heads, head_size), (kv_heads,) = q_shape, k_shape[-2:-1]
    group = heads // kv_heads
    tiles = TileConfig.forward(head_size, head_size, dtype, length * group)
    return _plan(tiles, group, length, queries, keys, rule)


def _plan(tiles: TileConfig, group: int, length: int, queries: Tokens, keys: Tokens, rule: AttentionRule) -> TritonPlan:
    tokens = RowTiles.of(length, group, tiles.block_q).tokens
    seen = whole_blocks(rule.visible(queries), keys, tokens, tiles.block_kv)
    return TritonPlan(seen, ranges_of(seen, tokens, tiles.block_kv))


def whole_blocks(queries: Visible, keys: Tokens, block_q: int, block_kv: int) -> Seen:
    """Pad tokens to whole blocks. Those beyond the end see nothing, and nothing sees them."""

    def pad(x: Any, block: int, **how: Any) -> Any:
        return None if x is None else jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), **how)

    kv_segments = jnp.where(keys.segments < 0, -2, keys.segments)
    # Queries beyond the end repeat the last one, so that they add no blocks with a mask.
    of_rows = queries.first, queries.last, jnp.maximum(queries.segments, -1)
    first, last, segments = (pad(x, block_q, mode="edge") for x in of_rows)
    return Seen(first, last, segments, pad(keys.positions, block_kv), pad(kv_segments, block_kv, constant_values=-2))


def ranges_of(seen: Seen, block_q: int, block_kv: int, from_keys: bool = False) -> Array:
    """The fields of `BlockRange` of each block of queries, or of keys, int32 `[Bm, blocks, 4]`."""
    q_blocks = summarise_visible(Visible(seen.first, seen.last, seen.segments), block_q)
    kv_blocks = summarise(Tokens(seen.kv_positions, seen.kv_segments), block_kv)
    q_blocks, kv_blocks = _broadcast_batch((q_blocks, kv_blocks))
    num_whole = (q_blocks if from_keys else kv_blocks).uniform.shape[1]
    per_block = jax.vmap(
        lambda queries, keys: block_range(queries, keys, num_whole), (None, 0) if from_keys else (0, None)
    )
    return jnp.stack(jax.vmap(per_block)(q_blocks, kv_blocks), -1)


def _broadcast_batch(blocks: Any) -> Any:
    """Broadcast the arrays of a tree, `[1 or B, blocks]`, to one batch."""
    batch = max(len(x) for x in jax.tree.leaves(blocks))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, x.shape[1])), blocks)


def _num_splits(programs: int, num_blocks: int) -> int:
    """Programs that share a tile, so that all multiprocessors have some."""
    wanted = Device.target().num_multiprocessors * _PROGRAMS // programs
    return max(1, min(wanted, num_blocks // _FEWEST_BLOCKS))


@kernel_jit("config", "out_dtype")
def _attention_forward(
    config: ForwardConfig, q: Array, k: Array, v: Array, plan: TritonPlan, out_dtype: DTypeLike
) -> list[Array]:
    """Return out `[splits, B, T, N, Hv]` and lse `[splits, B, T, N]`."""
    batch, length, heads, _ = q.shape
    kv_heads = k.shape[-2]
    tokens = [x for x in plan.seen if x is not None]
    kernel = adapter.kernel(
        functools.partial(_forward_kernel, config, plan.seen.first is not None, plan.seen.last is not None),
        [
            ((config.splits, batch, length, heads, config.sizes[1]), out_dtype),
            ((config.splits, batch, length, heads), jnp.float32),
        ],
        like=q,
        grid=(config.rows.num, kv_heads * config.rows.parts, batch * config.splits),
        config=config.tiles,
        name="attention_forward",
    )
    return kernel(q, k, v, plan.ranges, *tokens)


class Rows(NamedTuple):
    """The rows of a tile: int32 `[R]` each. Those that are not `own` are beyond its end."""

    token: Array
    head: Array
    own: Array | None  # None: all are
    # As above, but rows beyond the end repeat others, so that they can be loaded without a mask.
    loaded_token: Array
    loaded_head: Array

    @classmethod
    def of(
        cls, rows: RowTiles, block_q: int, group: int, length: int, tile: Array, kv_head: Array, part: Array
    ) -> "Rows":
        row = lax.iota(jnp.int32, block_q)
        token = tile * rows.tokens + lax.div(row, jnp.int32(rows.members))
        member = part * rows.members + lax.rem(row, jnp.int32(rows.members))
        own, loaded = None, (token, member)
        if rows.tokens * rows.members < block_q or length % rows.tokens or group % rows.members:
            own = (row < rows.tokens * rows.members) & (token < length) & (member < group)
            loaded = jnp.minimum(token, length - 1), jnp.minimum(member, group - 1)
        first = kv_head * group
        return cls(token, first + member, own, loaded[0], first + loaded[1])


def entry_of(ref: Any, entry: Array) -> Array | int:
    """The entry of an array whose first dimension is the batch, or 1."""
    return entry if ref.shape[0] > 1 else 0


def _forward_kernel(config: ForwardConfig, has_first: bool, has_last: bool, *refs: Any) -> None:
    q_ref, k_ref, v_ref, ranges, *tokens, out_ref, lse_ref = refs
    first = tokens.pop(0) if has_first else None
    last = tokens.pop(0) if has_last else None
    seen = Seen(first, last, *tokens)
    # Long tiles begin first: in most layouts the last queries see most.
    tile = config.rows.num - 1 - pl.program_id(0)
    kv_head, part = (op(pl.program_id(1), jnp.int32(config.rows.parts)) for op in (lax.div, lax.rem))
    entry, split = (op(pl.program_id(2), jnp.int32(config.splits)) for op in (lax.div, lax.rem))
    block_q, block_kv = config.tiles.block_q, config.tiles.block_kv
    (length, kv_length), (head_size, value_size) = config.lengths, config.sizes
    key_pieces, value_pieces = pieces_of(head_size), pieces_of(value_size)
    rows = Rows.of(config.rows, block_q, config.group, length, tile, kv_head, part)
    loaded: dict[str, Any] = {"rows": rows.loaded_token[:, None], "head": rows.loaded_head[:, None]}
    q = load_rows(q_ref, entry, **loaded, pieces=key_pieces, mask=None)
    visible = tuple(None if x is None else load(x, entry_of(x, entry), rows.loaded_token) for x in seen[:3])

    kv_entry = entry if k_ref.shape[-4] > 1 else 0

    def step(block: Array, softmax: OnlineSoftmax, masked: bool) -> OnlineSoftmax:
        key = block * block_kv + lax.iota(jnp.int32, block_kv)
        exists = (key < kv_length)[:, None] if masked and kv_length % block_kv else None
        at: dict[str, Any] = {"rows": key[:, None], "head": kv_head, "mask": exists}
        k = load_rows(k_ref, *config.halves[0], kv_entry, pieces=key_pieces, **at)
        scores = config.scores.scores(sum_products(q, k))
        if masked:
            scores = jnp.where(visible_keys(seen, visible, entry, key), scores, -jnp.inf)
        v = load_rows(v_ref, *config.halves[1], kv_entry, pieces=value_pieces, **at)
        return softmax.absorb(scores, v, config.scores)

    found = BlockRange(*(load(ranges, entry_of(ranges, entry), tile, i) for i in range(4)))
    softmax = sweep(share_of(found, split, config.splits), step, OnlineSoftmax.empty(block_q, value_pieces))
    outs, lse = softmax.state(config.scores)
    own = None if rows.own is None else rows.own[:, None]
    at: dict[str, Any] = {"rows": rows.token[:, None], "head": rows.head[:, None], "mask": own}
    store_rows(out_ref, split, entry, pieces=value_pieces, values=outs, **at)
    store(lse_ref, split, entry, rows.token, rows.head, value=lse, mask=rows.own)


def sum_products(rows: Sequence[Array], others: Sequence[Array]) -> Array:
    """The products of rows `[R, size]` and others `[keys, size]`, summed over the pieces of a head: `[R, keys]`."""
    found, *rest = (product(a, b, transposed=True) for a, b in zip(rows, others, strict=True))
    return functools.reduce(jnp.add, rest, found)


def visible_keys(seen: Seen, rows: tuple[Any, ...], entry: Array, key: Array, transposed: bool = False) -> Array:
    """Whether rows see keys: bool `[R, keys]`, or `[keys, R]`. `rows` are the first three fields of `Seen` for them."""
    axis = 0 if transposed else 1
    first, last, segments = (x if x is None else jnp.expand_dims(x, axis) for x in rows)
    positions, kv_segments = (
        jnp.expand_dims(load(x, entry_of(x, entry), key), 1 - axis) for x in (seen.kv_positions, seen.kv_segments)
    )
    visible: Any = segments == kv_segments
    if last is not None:
        visible = visible & (positions <= last)
    if first is not None:
        visible = visible & (positions >= first)
    return visible


def share_of(blocks: BlockRange, number: Array, shares: int) -> BlockRange:
    """One of equal shares of a range of blocks."""
    if shares == 1:
        return blocks
    start, full_start, full_stop, stop = blocks
    share = lax.div(stop - start + (shares - 1), jnp.int32(shares))
    start = jnp.minimum(start + number * share, stop)
    stop = jnp.minimum(start + share, stop)
    full_start, full_stop = (jnp.clip(x, start, stop) for x in (full_start, full_stop))
    return BlockRange(start, full_start, full_stop, stop)


def sweep(blocks: BlockRange, step: Callable[[Array, Any, bool], Any], carry: Any) -> Any:
    """Run `step(block, carry, masked)` over a range of blocks, first those without a mask."""
    start, full_start, full_stop, stop = blocks
    num_full = full_stop - full_start

    def edge(n: Array, carry: Any) -> Any:
        block = start + n
        return step(jnp.where(block < full_start, block, block + num_full), carry, True)

    carry = lax.fori_loop(full_start, full_stop, lambda block, carry: step(block, carry, False), carry)
    return lax.fori_loop(0, stop - start - num_full, edge, carry)
