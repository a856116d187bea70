"""Cross entropy by chunks of tokens, and the targets of a language model."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from longctx.kernels.arrays import check_ids, check_int32


def map_chunks(
    function: Callable[..., Array], rows: tuple[Array, ...], padding: tuple[float, ...], chunk_size: int | None
) -> Array:
    """Apply `function` to chunks of at most `chunk_size` rows, padded; results are `[chunks, ...]`.

    A gradient computes each chunk again, so only its rows are kept for it. Source: Blockwise Parallel Transformer (Liu
    and Abbeel 2023), section 3.
    """
    count = rows[0].shape[0]
    chunks = 1 if chunk_size is None else math.ceil(count / chunk_size)
    size = math.ceil(count / chunks)

    def split(x: Array, value: float) -> Array:
        widths = [(0, chunks * size - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=value).reshape(chunks, size, *x.shape[1:])

    step = jax.checkpoint(lambda chunk: function(*chunk), prevent_cse=chunks == 1)
    return lax.map(step, tuple(map(split, rows, padding)))


def map_rows(function: Callable[[Array], Array], x: Array, chunk_size: int | None) -> Array:
    """Apply `function` to hidden states `[*B, T, D]` by chunks of tokens; without chunks nothing is recomputed."""
    if chunk_size is None:
        return function(x)
    rows = x.reshape(-1, x.shape[-1])
    y = map_chunks(function, (rows,), (0,), chunk_size)
    return y.reshape(-1, y.shape[-1])[: rows.shape[0]].reshape(x.shape)


def next_token_targets(
    tokens: Int[ArrayLike, "*B T"], segment_ids: Int[ArrayLike, "*B T"] | None = None
) -> Int[Array, "*B T"]:
    """The token that follows each token in its segment; -1 where none does, and in padding.

    Args:
      tokens: integers `[*B, T]`, in order: before `shard_sequence`, not after it.
      segment_ids: integers `[*B, T]` of packed sequences, each of which is one run of tokens; negative for padding.
        None: one sequence.

    Returns:
      int32 `[*B, T]`.

    Raises:
      TypeError: an argument holds no integers.
      ValueError: the shapes differ, or integers don't fit into int32.

    Examples:
      >>> import jax.numpy as jnp
      >>> from longctx.nnx import next_token_targets
      >>> next_token_targets(jnp.array([5, 6, 7, 8]), jnp.array([0, 0, 1, 1])).tolist()
      [6, -1, 8, -1]
    """
    tokens = jnp.asarray(check_int32("tokens", tokens))
    segments = jnp.zeros_like(tokens) if segment_ids is None else jnp.asarray(check_ids("segment_ids", segment_ids))
    if tokens.ndim < 1:
        raise ValueError("tokens must be [*B, T], got a scalar")
    if segments.shape != tokens.shape:
        raise ValueError(f"segment_ids must have the shape of tokens, {tokens.shape}, got {segments.shape}")
    is_next = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] >= 0)
    targets = jnp.where(is_next, tokens[..., 1:], -1)
    return jnp.concatenate([targets, jnp.full_like(tokens[..., :1], -1)], -1)


def sum_cross_entropy(
    logits_of: Callable[[Array], Array],
    hidden: Float[Array, "rows D"],
    targets: Int[Array, " rows"],
    chunk_size: int | None,
) -> Float[Array, ""]:
    """Sum the cross entropy of all rows with a target >= 0 in float32, with the logits of one chunk at a time."""

    def chunk(hidden: Array, targets: Array) -> Array:
        logits = logits_of(hidden)
        own = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], 1)[:, 0]
        return jnp.sum(jnp.where(targets >= 0, jax.nn.logsumexp(logits, 1) - own, 0))

    return jnp.sum(map_chunks(chunk, (hidden, targets), (0, -1), chunk_size))
