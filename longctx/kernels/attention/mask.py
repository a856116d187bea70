"""The mask follows from positions, segment ids and a window, token by token and block by block."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Tokens(NamedTuple):
    """Positions and segment ids of some tokens: int32 or int64 arrays `[Bm, T]`, where Bm is 1 or the batch.

    A negative segment marks padding, which sees nothing and which nothing sees. Queries may have limits of their own:
    the first and the last position that each sees, besides what the rule says. None: there is no such limit.
    """

    positions: Array
    segments: Array
    first: Array | None = None
    last: Array | None = None


class Visible(NamedTuple):
    """The keys that queries see: those of their segment at positions from `first` to `last`, arrays `[Bm, T]`.

    None: there is no such limit. So kernels know neither causality nor windows.
    """

    first: Array | None
    last: Array | None
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


class VisibleBlocks(NamedTuple):
    """A summary of what the queries of each block see: arrays `[Bm, blocks]`, None where there is no limit.

    Some query sees keys from `first_some` to `last_some`; every query sees those from `first_all` to `last_all`.
    """

    first_some: Array | None
    first_all: Array | None
    last_all: Array | None
    last_some: Array | None
    first_segment: Array
    last_segment: Array
    uniform: Array


def visible(queries: Visible, keys: Tokens) -> Array:
    """Whether a query sees a key: `[Bm, T]` and `[Bm, S]` -> bool `[Bm, T, S]`."""
    q_segments, kv_segments = queries.segments[:, :, None], keys.segments[:, None, :]
    seen = (q_segments == kv_segments) & (kv_segments >= 0)
    if queries.last is not None:
        seen &= keys.positions[:, None, :] <= queries.last[:, :, None]
    if queries.first is not None:
        seen &= keys.positions[:, None, :] >= queries.first[:, :, None]
    return seen


def summarise(tokens: Tokens, block: int) -> Blocks:
    """Summarise blocks of the tokens `[Bm, T]`. The last block is moved back, so that it ends at T."""
    positions, segments = _blocks(tokens.positions, block), _blocks(tokens.segments, block)
    real = segments >= 0
    return Blocks(_least(positions, real), _greatest(positions, real), *_of_segments(segments))


def summarise_visible(queries: Visible, block: int) -> VisibleBlocks:
    """Summarise likewise what queries `[Bm, T]` see."""
    segments = _blocks(queries.segments, block)
    real = segments >= 0

    def extremes(x: Array | None) -> tuple[Array | None, Array | None]:
        if x is None:
            return None, None
        blocks = _blocks(x, block)
        return _least(blocks, real), _greatest(blocks, real)

    return VisibleBlocks(*extremes(queries.first), *extremes(queries.last), *_of_segments(segments))


def _least(x: Array, real: Array) -> Array:
    return jnp.min(jnp.where(real, x, jnp.iinfo(x.dtype).max), 2)


def _greatest(x: Array, real: Array) -> Array:
    return jnp.max(jnp.where(real, x, -jnp.iinfo(x.dtype).max), 2)


def _of_segments(segments: Array) -> tuple[Array, Array, Array]:
    """The least and the greatest segment of each block that is no padding, and whether there is one and no other."""
    first, last = _least(segments, segments >= 0), jnp.max(segments, 2)
    return first, jnp.where(last < 0, -1, last), (first == last) & jnp.all(segments >= 0, 2)


def _blocks(x: Array, block: int) -> Array:
    """`[Bm, T]` -> `[Bm, blocks, block]`."""
    num_whole = x.shape[1] // block
    blocks = x[:, : num_whole * block].reshape(-1, num_whole, block)
    if x.shape[1] % block:
        blocks = jnp.concatenate([blocks, x[:, None, -block:]], 1)
    return blocks


def block_range(queries: VisibleBlocks, keys: Blocks, num_whole: int) -> BlockRange:
    """The range for one block of queries (scalars) among blocks of keys `[blocks]`, the first `num_whole` whole.

    Or for one block of keys (scalars), the range among blocks of queries that see them. Correct for tokens in any
    order, and tight for tokens sorted by (segment, position), as those of a shard are.
    """
    num_blocks = max(queries.first_segment.size, keys.first_segment.size)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    seen = (queries.first_segment <= keys.last_segment) & (queries.last_segment >= keys.first_segment)
    # A last block that was moved back overlaps the one before it. Those keys are masked, so it is never full.
    full = (queries.first_segment == keys.first_segment) & queries.uniform & keys.uniform & (block < num_whole)
    if queries.last_some is not None and queries.last_all is not None:
        seen &= keys.first_position <= queries.last_some
        full &= keys.last_position <= queries.last_all
    if queries.first_some is not None and queries.first_all is not None:
        seen &= keys.last_position >= queries.first_some
        full &= keys.first_position >= queries.first_all
    stop = jnp.max(jnp.where(seen, block + 1, 0))
    start = jnp.minimum(jnp.min(jnp.where(seen, block, num_blocks)), stop)
    full_start = jnp.minimum(jnp.min(jnp.where(full, block, num_blocks)), stop)
    broken = ~full & (block >= full_start)
    full_stop = jnp.minimum(jnp.min(jnp.where(broken, block, num_blocks)), stop)
    return BlockRange(start, full_start, full_stop, stop)
