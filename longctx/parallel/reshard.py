"""From contiguous parts of a sequence to a layout's shards and back, inside `shard_map`; no rank holds it whole."""

import math

import jax.numpy as jnp
from jax import Array, lax


def padded_length(length: int, num_ranks: int, layout: str) -> int:
    """The length up to which a sequence is filled up, so that all pieces that ranks exchange are equally long."""
    pieces = {"contiguous": num_ranks, "zigzag": 2 * num_ranks, "striped": num_ranks**2}[layout]
    return math.ceil(length / pieces) * pieces


def reshard_to_layout(x: Array, axis_name: str, layout: str) -> Array:
    """This rank's contiguous part `[B, L, ...]` for its shard in the layout, `[B, L, ...]`.

    Zigzag: half-shards in two permutes. Striped: one all-to-all. At most `L * (N - 1) / N` to `L` tokens leave a rank.
    """
    n = lax.axis_size(axis_name)
    if layout == "zigzag":
        first, second = jnp.split(x, 2, 1)
        even = lax.ppermute(first, axis_name, _chunk_owners(n, 0))
        odd = lax.ppermute(second, axis_name, _chunk_owners(n, 1))
        # Rank i gets chunks i and 2N - 1 - i, of which one is even.
        low_is_even = lax.axis_index(axis_name) % 2 == 0
        return jnp.concatenate([jnp.where(low_is_even, even, odd), jnp.where(low_is_even, odd, even)], 1)
    if layout == "striped":
        batch, length, *rest = x.shape
        stripes = x.reshape(batch, length // n, n, *rest)
        return lax.all_to_all(stripes, axis_name, 2, 1, tiled=True).reshape(x.shape)
    return x


def reshard_to_contiguous(x: Array, axis_name: str, layout: str) -> Array:
    """Undo `reshard_to_layout`."""
    n = lax.axis_size(axis_name)
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
