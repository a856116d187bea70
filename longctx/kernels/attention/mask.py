"""The mask follows from positions and segment ids, token by token and block by block."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Tokens(NamedTuple):
    """Positions and segment ids of some tokens: two int32 or int64 arrays `[Bm, T]`, where Bm is 1 or the batch.

    A negative segment marks padding, which sees nothing and which nothing sees.
    """

    positions: Array
    segments: Array


class Blocks(NamedTuple):
    """A summary of each block of tokens: five arrays `[Bm, blocks]`.

    Minima and maxima exclude padding; in a block of padding alone they are an empty range.
    """

    first_position: Array
    last_position: Array
    first_segment: Array
    last_segment: Array
    uniform: Array  # whether all tokens are of one segment and none is padding


class BlockRange(NamedTuple):
    """The key blocks that a block of queries needs: four int32 scalars.

    Blocks `[start, stop)` hold every key that some query sees. Of the blocks `[full_start, full_stop)` among them every
    query sees every key, so they need no mask.
    """

    start: Array
    full_start: Array
    full_stop: Array
    stop: Array


def visible(queries: Tokens, keys: Tokens, causal: bool) -> Array:
    """Whether a query sees a key: equal segments and, if causal, no later position.

    Tokens `[Bm, T]` and `[Bm, S]` -> bool `[Bm, T, S]`.
    """
    q_segments, kv_segments = queries.segments[:, :, None], keys.segments[:, None, :]
    seen = (q_segments == kv_segments) & (kv_segments >= 0)
    if causal:
        seen &= keys.positions[:, None, :] <= queries.positions[:, :, None]
    return seen


def summarise(tokens: Tokens, block: int) -> Blocks:
    """Summarise blocks of the tokens `[Bm, T]`. The last block is moved back, so that it ends at T."""
    positions, segments = _blocks(tokens.positions, block), _blocks(tokens.segments, block)
    real = segments >= 0
    latest = jnp.iinfo(positions.dtype).max
    first_segment = jnp.min(jnp.where(real, segments, jnp.iinfo(segments.dtype).max), 2)
    last_segment = jnp.max(segments, 2)
    return Blocks(
        first_position=jnp.min(jnp.where(real, positions, latest), 2),
        last_position=jnp.max(jnp.where(real, positions, -latest), 2),
        first_segment=first_segment,
        last_segment=jnp.where(last_segment < 0, -1, last_segment),
        uniform=(first_segment == last_segment) & jnp.all(real, 2),
    )


def _blocks(x: Array, block: int) -> Array:
    """`[Bm, T]` -> `[Bm, blocks, block]`."""
    num_whole = x.shape[1] // block
    blocks = x[:, : num_whole * block].reshape(-1, num_whole, block)
    if x.shape[1] % block:
        blocks = jnp.concatenate([blocks, x[:, None, -block:]], 1)
    return blocks


def block_range(queries: Blocks, keys: Blocks, causal: bool, num_whole: int) -> BlockRange:
    """The range for one block of queries (scalars) among blocks of keys `[blocks]`, the first `num_whole` whole.

    Correct for tokens in any order, and tight for tokens sorted by (segment, position), as those of a shard are.
    """
    num_blocks = keys.first_segment.shape[0]
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    seen = (queries.first_segment <= keys.last_segment) & (queries.last_segment >= keys.first_segment)
    # A last block that was moved back overlaps the one before it. Those keys are masked, so it is never full.
    full = (queries.first_segment == keys.first_segment) & queries.uniform & keys.uniform & (block < num_whole)
    if causal:
        seen &= keys.first_position <= queries.last_position
        full &= keys.last_position <= queries.first_position
    stop = jnp.max(jnp.where(seen, block + 1, 0))
    start = jnp.minimum(jnp.min(jnp.where(seen, block, num_blocks)), stop)
    full_start = jnp.minimum(jnp.min(jnp.where(full, block, num_blocks)), stop)
    broken = ~full & (block >= full_start)
    full_stop = jnp.minimum(jnp.min(jnp.where(broken, block, num_blocks)), stop)
    return BlockRange(start, full_start, full_stop, stop)
