"""Who sees whom follows from positions and segments, token by token and block by block."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Tokens(NamedTuple):
    """What a mask needs to know of some tokens: two int32 arrays `[Bm, T]`, Bm being 1 or the batch.

    A negative segment is padding: it sees nothing and nobody sees it.
    """

    positions: Array
    segments: Array


class BlockRanges(NamedTuple):
    """For each block of queries, the range of key blocks it needs: four int32 arrays `[Bm, blocks of queries]`.

    Blocks `[start, stop)` hold every key that the queries see. Blocks `[full_start, full_stop)`, within it, are
    seen whole by every query, so that they need no mask.
    """

    start: Array
    full_start: Array
    full_stop: Array
    stop: Array


def visible(queries: Tokens, keys: Tokens, causal: bool) -> Array:
    """The rule: equal segments, and no key after its query. Tokens `[Bm, T]`, `[Bm, S]` -> bool `[Bm, T, S]`."""
    q_segments, kv_segments = queries.segments[:, :, None], keys.segments[:, None, :]
    seen = (q_segments == kv_segments) & (kv_segments >= 0)
    if causal:
        seen &= keys.positions[:, None, :] <= queries.positions[:, :, None]
    return seen


def _blocks(x: Array, block: int) -> Array:
    """`[Bm, T]` -> `[Bm, blocks, block]`. The last block is moved back to end at T, so that nothing is padded."""
    num_whole = x.shape[1] // block
    blocks = x[:, : num_whole * block].reshape(-1, num_whole, block)
    if x.shape[1] % block:
        blocks = jnp.concatenate([blocks, x[:, None, -block:]], 1)
    return blocks


def block_ranges(queries: Tokens, keys: Tokens, causal: bool, q_block: int, kv_block: int) -> BlockRanges:
    """Ranges of key blocks for each block of queries, in memory linear in the number of blocks.

    Right for tokens in any order, and tight where they are sorted by (segment, position), as a shard's are.
    """
    q, kv = _summarise(queries, q_block), _summarise(keys, kv_block)
    num_blocks = kv.first_segment.shape[1]
    # A last block that was moved back overlaps its neighbour: those keys are masked, so it is never full.
    whole = (jnp.arange(num_blocks) + 1) * kv_block <= keys.segments.shape[1]

    def pairs(compare: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
        return compare(a[:, :, None], b[:, None, :])

    seen = pairs(jnp.less_equal, q.first_segment, kv.last_segment)
    seen &= pairs(jnp.greater_equal, q.last_segment, kv.first_segment)
    full = pairs(jnp.equal, q.first_segment, kv.first_segment) & pairs(jnp.logical_and, q.uniform, kv.uniform)
    full &= whole[None, None, :]
    if causal:
        seen &= pairs(jnp.greater_equal, q.last_position, kv.first_position)
        full &= pairs(jnp.greater_equal, q.first_position, kv.last_position)

    block = jnp.arange(num_blocks, dtype=jnp.int32)[None, None, :]
    start = jnp.min(jnp.where(seen, block, num_blocks), 2)
    stop = jnp.max(jnp.where(seen, block + 1, 0), 2)
    start = jnp.minimum(start, stop)
    full_start = jnp.minimum(jnp.min(jnp.where(full, block, num_blocks), 2), stop)
    broken = ~full & (block >= full_start[:, :, None])
    full_stop = jnp.minimum(jnp.min(jnp.where(broken, block, num_blocks), 2), stop)
    return BlockRanges(start, full_start, full_stop, stop)


class _Summary(NamedTuple):
    """Extremes over each block's tokens that are not padding, `[Bm, blocks]`; an empty range where all are."""

    first_position: Array
    last_position: Array
    first_segment: Array
    last_segment: Array
    uniform: Array  # one segment and no padding


def _summarise(tokens: Tokens, block: int) -> _Summary:
    positions, segments = _blocks(tokens.positions, block), _blocks(tokens.segments, block)
    real = segments >= 0
    big = jnp.iinfo(jnp.int32).max
    first_segment = jnp.min(jnp.where(real, segments, big), 2)
    last_segment = jnp.max(segments, 2)
    return _Summary(
        first_position=jnp.min(jnp.where(real, positions, big), 2),
        last_position=jnp.max(jnp.where(real, positions, -big), 2),
        first_segment=first_segment,
        last_segment=jnp.where(last_segment < 0, -1, last_segment),
        uniform=(first_segment == last_segment) & jnp.all(real, 2),
    )
