"""Cross entropy by chunks of tokens, and the targets of a language model."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from longctx.kernels.arrays import check_ids, check_int32
from longctx.nnx.chunks import map_chunks


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
    """The cross entropy of all rows with a target >= 0, summed in float32; the others count nothing.

    Args:
      logits_of: float32 logits `[rows, vocab]` of hidden states. They are computed for a chunk at a time, and again for
        the gradient.
    """

    def chunk(hidden: Array, targets: Array) -> Array:
        logits = logits_of(hidden)
        own = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], 1)[:, 0]
        return jnp.sum(jnp.where(targets >= 0, jax.nn.logsumexp(logits, 1) - own, 0))

    return jnp.sum(map_chunks(chunk, (hidden, targets), (0, -1), chunk_size))
