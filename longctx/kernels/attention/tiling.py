"""Tiles of blockwise attention: blocks of query rows, each of which loops over blocks of keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.kernels.attention.mask import (
    Blocks,
    Tokens,
    Visible,
    VisibleBlocks,
    block_range,
    summarise,
    summarise_visible,
    visible,
)
from longctx.kernels.attention.rule import AttentionRule

# Rows of a tile and keys of a block, chosen by measurement on CPU (docs/attention.md): fewer rows take longer blocks.
_ROWS = 1024
_SCORES = _ROWS * 256
_MAX_KV_BLOCK = 512

# Slice indices must share a type; a plain 0 is an int64 when x64 is on.
_ZERO = np.int32(0)


class Tiling(NamedTuple):
    """The tiles of one call. Blocks are slices in place: the last block is moved back, so that it ends at T or S."""

    q_positions: Array
    queries: Visible
    keys: Tokens
    kv_heads: int
    group: int
    q_block: int
    kv_block: int
    q_blocks: VisibleBlocks
    kv_blocks: Blocks
    num_tiles: int
    shared_keys: bool
    block_heads: int

    @classmethod
    def of(
        cls,
        q: Array,
        k: Array,
        tokens: Tokens,
        keys: Tokens,
        rule: AttentionRule,
        join_heads: bool = False,
    ) -> "Tiling":
        """Choose tiles for q `[B, T, N, H]` and k `[B, S, K, H]` (or `[2, B, S, K, H]`, keys and values in one array).

        With `join_heads`, the KV heads of a key form one head of size K * H, which all query heads share.
        """
        queries = rule.visible(tokens)
        batch, q_length, heads, _ = q.shape
        kv_batch, kv_length, kv_heads, _ = k.shape[-4:]
        block_heads, kv_heads = (kv_heads, 1) if join_heads else (1, kv_heads)
        group = heads // kv_heads
        q_block = max(1, _ROWS // group)
        # A square may be a hop of a zigzag ring, where a rank has two parts of the sequence: no tile has some of both.
        divide = _divide_evenly if queries.last is not None and q_length == kv_length else min
        q_block = divide(q_length, q_block)
        kv_block = divide(kv_length, min(_MAX_KV_BLOCK, max(1, _SCORES // (q_block * group))))
        q_blocks, kv_blocks = summarise_visible(queries, q_block), summarise(keys, kv_block)
        num_tiles = batch * kv_heads * q_blocks.uniform.shape[1]
        return cls(
            q_positions=jnp.asarray(tokens.positions),
            queries=queries,
            keys=keys,
            kv_heads=kv_heads,
            group=group,
            q_block=q_block,
            kv_block=kv_block,
            q_blocks=q_blocks,
            kv_blocks=kv_blocks,
            num_tiles=num_tiles,
            shared_keys=kv_batch == 1,
            block_heads=block_heads,
        )

    def group_heads(self, x: Array) -> Array:
        """Group the query heads of each KV head: `[B, T, N, ...]` -> `[B, T, K, G, ...]`."""
        return x.reshape(*x.shape[:2], self.kv_heads, self.group, *x.shape[3:])

    def tile(self, index: Array) -> "Tile":
        """Tile number `index` in the order (sequence, KV head, block of queries), the last running fastest."""
        index, q_index = jnp.divmod(jnp.int32(index), self.q_blocks.uniform.shape[1])
        batch, head = jnp.divmod(index, self.kv_heads)
        first = jnp.minimum(q_index * self.q_block, self.queries.segments.shape[1] - self.q_block)
        return Tile(self, batch, head, q_index, first)


def _divide_evenly(length: int, block: int) -> int:
    """The longest block that is no longer than `block`, and of which an even number makes up the length."""
    half = -(-length // 2)
    return -(-half // -(-half // block))


class Tile(NamedTuple):
    """A block of queries with the query heads of one KV head folded into its rows, R = q_block * G."""

    tiling: Tiling
    batch: Array
    head: Array
    q_index: Array
    first: Array

    def rows(self, x: Array) -> Array:
        """Take the block of rows of x `[B, T, K, G, ...]`: `[R, ...]`."""
        block = lax.dynamic_slice(x, self._at(x, self.first), (1, self.tiling.q_block, 1, *x.shape[3:]))
        return block.reshape(-1, *x.shape[4:])

    def put_rows(self, x: Array, rows: Array) -> Array:
        """Write rows `[R, ...]` into x `[B, T, K, G, ...]`."""
        block = rows.reshape(1, self.tiling.q_block, 1, *x.shape[3:])
        return lax.dynamic_update_slice(x, block, self._at(x, self.first))

    def add_rows(self, x: Array, rows: Array) -> Array:
        """Add rows `[R, ...]` to x `[B, T, K, G, ...]`."""
        return self.put_rows(x, self.rows(x) + rows)

    def own_rows(self) -> Array:
        """Bool `[R]`: false for rows that the last tile, moved back, shares with the tile before."""
        own = self.first + jnp.arange(self.tiling.q_block) >= self.q_index * self.tiling.q_block
        return jnp.repeat(own, self.tiling.group)

    def block(self, x: Array, index: Array, half: int = 0) -> Array:
        """A block of keys `[kv_block, H]` (`[kv_block, K * H]` with joined heads) of x `[B, S, K, H]`.

        x may be `[2, B, S, K, H]`: the block is then of `x[half]`, sliced without a copy of that half.
        """
        size = (self.tiling.kv_block, self.tiling.block_heads, x.shape[-1])
        which = (np.int32(half),) if x.ndim == 5 else ()
        block = lax.dynamic_slice(x, (*which, *self._block_at(index)), (*(1 for _ in which), 1, *size))
        return block.reshape(self.tiling.kv_block, -1)

    def add_block(self, x: Array, index: Array, update: Array) -> Array:
        """Add to a block of x `[B, S, K, H]`."""
        update = (self.block(x, index) + update)[None, :, None]
        return lax.dynamic_update_slice(x, update, self._block_at(index))

    def scores(self, capped: Array, index: Array, rule: AttentionRule, bias: Array | None, masked: bool) -> Array:
        """The scores `[R, kv_block]` of a block, from the capped ones: with the bias, and if `masked` with the mask."""
        if bias is not None:
            tiling, first_key = self.tiling, self._first_key(index)
            rows = self._tokens(tiling.q_positions, self.first, tiling.q_block)[0]
            keys = self._tokens(tiling.keys.positions, first_key, tiling.kv_block)
            block = lax.dynamic_slice(bias, self._bias_at(bias, index), self._bias_size(bias))[0].swapaxes(0, 1)
            block = jnp.broadcast_to(block, (tiling.q_block, tiling.group, block.shape[2])).reshape(-1, block.shape[2])
            capped = rule.biased(capped, block, jnp.repeat(rows, tiling.group)[:, None], keys)
        return jnp.where(self.visible(index), capped, -jnp.inf) if masked else capped

    def add_bias(self, x: Array, index: Array, d_scores: Array) -> Array:
        """Add the gradients of scores `[R, kv_block]` to those of a bias `[B or 1, N or 1, T or 1, S or 1]`."""
        at, size = self._bias_at(x, index), self._bias_size(x)
        update = d_scores.reshape(1, self.tiling.q_block, self.tiling.group, -1).swapaxes(1, 2)
        shared = tuple(dim for dim, length in enumerate(size) if length == 1)
        return lax.dynamic_update_slice(x, lax.dynamic_slice(x, at, size) + jnp.sum(update, shared, keepdims=True), at)

    def _bias_size(self, x: Array) -> tuple[int, ...]:
        size = 1, self.tiling.group, self.tiling.q_block, self.tiling.kv_block
        return tuple(1 if length == 1 else own for length, own in zip(x.shape, size, strict=True))

    def _bias_at(self, x: Array, index: Array) -> tuple[Any, ...]:
        at = self.batch, self.head * self.tiling.group, self.first, self._first_key(index)
        return tuple(_ZERO if length == 1 else own for length, own in zip(x.shape, at, strict=True))

    def visible(self, index: Array) -> Array:
        """Bool `[R, kv_block]`: whether a row sees a key of the block."""
        tiling, first_key = self.tiling, self._first_key(index)
        queries = jax.tree.map(lambda x: self._tokens(x, self.first, tiling.q_block), tiling.queries)
        keys = jax.tree.map(lambda x: self._tokens(x, first_key, tiling.kv_block), tiling.keys)
        seen = visible(queries, keys)[0]
        # The last block, moved back, repeats keys of the block before, which has counted them.
        seen &= (first_key + jnp.arange(tiling.kv_block) >= index * tiling.kv_block)[None, :]
        return jnp.repeat(seen, tiling.group, axis=0)

    def sweep(self, step: Callable[[Array, Any, bool], Any], carry: Any) -> Any:
        """Run `step(block, carry, masked)` over the blocks that the tile sees, first those without a mask."""
        tiling = self.tiling
        queries = jax.tree.map(lambda x: self._tokens(x, self.q_index, 1)[0, 0], tiling.q_blocks)
        keys = Blocks(*(self._tokens(x, _ZERO, x.shape[1])[0] for x in tiling.kv_blocks))
        num_whole = tiling.keys.positions.shape[1] // tiling.kv_block
        start, full_start, full_stop, stop = block_range(queries, keys, num_whole)
        num_full = full_stop - full_start

        def edge(n: Array, carry: Any) -> Any:
            block = start + n
            return step(jnp.where(block < full_start, block, block + num_full), carry, True)

        carry = lax.fori_loop(full_start, full_stop, lambda block, carry: step(block, carry, False), carry)
        return lax.fori_loop(0, stop - start - num_full, edge, carry)

    def _at(self, x: Array, first: Array) -> tuple[Any, ...]:
        return (self.batch, first, self.head, *(_ZERO,) * (x.ndim - 3))

    def _block_at(self, index: Array) -> tuple[Any, ...]:
        entry = _ZERO if self.tiling.shared_keys else self.batch
        return entry, self._first_key(index), self.head, _ZERO

    def _tokens(self, x: Array, first: Array | np.int32, size: int) -> Array:
        """Slice an array `[Bm, L]`, where Bm is 1 or the batch -> `[1, size]`."""
        return lax.dynamic_slice(x, (self.batch if x.shape[0] > 1 else _ZERO, first), (1, size))

    def _first_key(self, index: Array) -> Array:
        return jnp.minimum(index * self.tiling.kv_block, self.tiling.keys.positions.shape[1] - self.tiling.kv_block)
