"""Who sees whom follows from positions and segments, token by token and block by block."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Tokens(NamedTuple):
    """What a mask needs to know of some tokens: two int32 arrays `[Bm, T]`, Bm being 1 or the batch.

    A negative segment is padding: it sees nothing and nobody sees it.
    """

    positions: Array
    segments: Array


class Blocks(NamedTuple):
    """What there is in each block of tokens: five arrays `[Bm, blocks]`.

    Extremes are over tokens that are not padding, and an empty range where all are.
    """

    first_position: Array
    last_position: Array
    first_segment: Array
    last_segment: Array
    uniform: Array  # one segment and no padding


class BlockRange(NamedTuple):
    """The key blocks that a block of queries needs: four int32 scalars.

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


def summarise(tokens: Tokens, block: int) -> Blocks:
    """The blocks of tokens `[Bm, T]`, the last of which is moved back to end at T."""
    positions, segments = _blocks(tokens.positions, block), _blocks(tokens.segments, block)
    real = segments >= 0
    big = jnp.iinfo(jnp.int32).max
    first_segment = jnp.min(jnp.where(real, segments, big), 2)
    last_segment = jnp.max(segments, 2)
    return Blocks(
        first_position=jnp.min(jnp.where(real, positions, big), 2),
        last_position=jnp.max(jnp.where(real, positions, -big), 2),
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

    Right for tokens in any order, and tight where they are sorted by (segment, position), as a shard's are.
    """
    num_blocks = keys.first_segment.shape[0]
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    seen = (queries.first_segment <= keys.last_segment) & (queries.last_segment >= keys.first_segment)
    # A last block that was moved back overlaps its neighbour: those keys are masked, so it is never full.
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
