"""Reorders a sequence into the shards of a layout and back: whole arrays, or inside `shard_map` each rank's part."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Shaped

from longctx.annotations import Integer, Real
from longctx.parallel.layout import Layout, shard_order


def shard_sequence(
    x: Array | np.ndarray, num_shards: Integer, layout: Layout = "zigzag", axis: int = 1, pad_value: Real = 0
) -> Array:
    """Reorder a sequence so that its N equal parts along `axis` are the shards of a layout.

    Args:
      x: any array `[..., T, ...]` with the sequence, of any length T, along `axis`.
      num_shards: ranks N. All shards have ceil(T / N) entries, padded at the end with `pad_value`.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`.
      axis: that of the sequence.
      pad_value: -1 for segment ids, so that padding is masked. (`shard_positions` returns both.)

    Returns:
      x with `N * ceil(T / N)` entries along `axis`, to be sharded over a mesh axis of N. In or outside of jit.

    Raises:
      ValueError: `layout`, `num_shards` or `axis` is invalid.

    Examples:
      >>> import jax.numpy as jnp
      >>> from longctx.parallel import shard_sequence
      >>> x = jnp.arange(8)[None]  # one sequence, of 8 tokens
      >>> shard_sequence(x, num_shards=2, layout="zigzag")  # rank 0 gets the first half of it, rank 1 the second
      Array([[0, 1, 6, 7, 2, 3, 4, 5]], dtype=int32)
    """
    axis = _check_axis(x, axis)
    order = shard_order(x.shape[axis], num_shards, layout).ravel()
    taken = jnp.take(x, np.maximum(order, 0), axis)
    if (order >= 0).all():
        return taken
    is_token = np.expand_dims(order >= 0, [a for a in range(x.ndim) if a != axis])
    return jnp.where(jnp.broadcast_to(is_token, taken.shape), taken, jnp.asarray(pad_value, taken.dtype))


def unshard_sequence(
    x: Array | np.ndarray, num_shards: Integer, layout: Layout = "zigzag", axis: int = 1, length: int | None = None
) -> Array:
    """Undo `shard_sequence`.

    Args:
      x: an array `[..., N * ceil(T / N), ...]` whose N equal parts along `axis` are the shards of a layout.
      num_shards, layout, axis: as for `shard_sequence`.
      length: T of the sequence without padding. Default: the size of `axis`.

    Returns:
      x with T entries along `axis`, in the order of the sequence. In or outside of jit.

    Raises:
      ValueError: `shard_sequence` would give a sequence of this length another number of entries; or as there.

    Examples:
      >>> import jax.numpy as jnp
      >>> from longctx.parallel import shard_sequence, unshard_sequence
      >>> x = jnp.arange(7)[None]
      >>> shards = shard_sequence(x, num_shards=2, pad_value=-1)
      >>> unshard_sequence(shards, num_shards=2, length=7)
      Array([[0, 1, 2, 3, 4, 5, 6]], dtype=int32)
    """
    axis = _check_axis(x, axis)
    length = x.shape[axis] if length is None else length
    order = shard_order(length, num_shards, layout).ravel()
    if order.size != x.shape[axis]:
        raise ValueError(
            f"length must be that of a sequence with {x.shape[axis]} entries in {num_shards} shards, got {length}"
        )
    places = np.empty(length, int)
    places[order[order >= 0]] = np.flatnonzero(order >= 0)
    return jnp.take(x, places, axis)


def _check_axis(x: Array | np.ndarray, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must index one of the {x.ndim} axes of x, got {axis}")
    return axis % x.ndim


def padded_length(length: int, num_ranks: int, layout: Layout) -> int:
    """The length to which a sequence is padded, so that all pieces that ranks exchange are equally long."""
    pieces = {"contiguous": num_ranks, "zigzag": 2 * num_ranks, "striped": num_ranks**2}[layout]
    return math.ceil(length / pieces) * pieces


def pad_sequence(x: Shaped[Array, "B T *rest"], num_ranks: int, layout: Layout, value: int = 0) -> Array:
    """Return x with `padded_length` entries along axis 1, the new ones of this value; outside `shard_map`."""
    missing = padded_length(x.shape[1], num_ranks, layout) - x.shape[1]
    widths = [(0, missing * (axis == 1)) for axis in range(x.ndim)]
    # All paddings are with 0: where one array is padded with two values (a token's position and its segment may be
    # equal), XLA's partitioner takes the second result for the first (jaxlib 0.10; a kin of jax-ml/jax#39301).
    return jnp.pad(x - value, widths) + value if value else jnp.pad(x, widths)


def reshard_to_layout(x: Shaped[Array, "B L *rest"], axis_name: str, layout: Layout) -> Shaped[Array, "B L *rest"]:
    """Exchange this rank's contiguous part of a sequence for its shard in the layout, inside `shard_map`.

    Zigzag sends half-shards in two permutes, striped one all-to-all: L tokens at most leave a rank.
    """
    n = lax.axis_size(axis_name)
    if n == 1:  # which all layouts are the same on
        return x
    if layout == "zigzag":
        first, second = jnp.split(x, 2, 1)
        even = lax.ppermute(first, axis_name, _chunk_owners(n, 0))
        odd = lax.ppermute(second, axis_name, _chunk_owners(n, 1))
        # Rank i gets chunks i and 2N - 1 - i, of which one is even and one odd.
        low_is_even = lax.axis_index(axis_name) % 2 == 0
        return jnp.concatenate([jnp.where(low_is_even, even, odd), jnp.where(low_is_even, odd, even)], 1)
    if layout == "striped":
        batch, length, *rest = x.shape
        stripes = x.reshape(batch, length // n, n, *rest)
        return lax.all_to_all(stripes, axis_name, 2, 1, tiled=True).reshape(x.shape)
    return x


def reshard_to_contiguous(x: Shaped[Array, "B L *rest"], axis_name: str, layout: Layout) -> Shaped[Array, "B L *rest"]:
    """Undo `reshard_to_layout`."""
    n = lax.axis_size(axis_name)
    if n == 1:
        return x
    if layout == "zigzag":
        low, high = jnp.split(x, 2, 1)
        low_is_even = lax.axis_index(axis_name) % 2 == 0
        even, odd = jnp.where(low_is_even, low, high), jnp.where(low_is_even, high, low)
        back = ([(owner, rank) for rank, owner in _chunk_owners(n, parity)] for parity in (0, 1))
        parts = (lax.ppermute(half, axis_name, way) for half, way in zip((even, odd), back, strict=True))
        return jnp.concatenate(list(parts), 1)
    if layout == "striped":
        batch, length, *rest = x.shape
        stripes = x.reshape(batch, n, length // n, 1, *rest)
        return lax.all_to_all(stripes, axis_name, 1, 3, tiled=True).reshape(x.shape)
    return x


def _chunk_owners(num_ranks: int, parity: int) -> list[tuple[int, int]]:
    """(r, owner of chunk 2r + parity in zigzag): a permutation of the ranks."""
    chunks = [2 * rank + parity for rank in range(num_ranks)]
    return [(rank, min(chunk, 2 * num_ranks - 1 - chunk)) for rank, chunk in enumerate(chunks)]
