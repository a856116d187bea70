"""Sequence pipeline parallelism: chunks of one sequence follow each other densely through the stages.

Stage s works on chunk t - s at tick t. A chunk's attention in a stage needs the keys and values of the chunks before it
in that stage alone, and these have just been there: so, other than in a pipeline of batches, no chunk waits for the one
before it to come out (Mnemosyne, 4.3; Medha, 3.3).
"""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Shaped

from longctx.kernels.attention.operands import match_varying

State = TypeVar("State")


def enter_stage(
    x: Shaped[Array, "*chunk"], entering: Shaped[Array, "*chunk"], axis_name: str = "stage"
) -> Shaped[Array, "*chunk"]:
    """What this stage works on in this tick, inside `jax.shard_map`: one permute, asynchronous on GPUs.

    Args:
      x: what this stage made in the tick before; it goes to the next one.
      entering: what comes into the first stage, shaped like x. It counts there alone.
    """
    stages = lax.axis_size(axis_name)
    if stages == 1:
        return entering
    arriving = lax.ppermute(x, axis_name, [(stage, stage + 1) for stage in range(stages - 1)])
    return jnp.where(lax.axis_index(axis_name) == 0, entering, arriving)


def sequence_pipeline(
    stage_fn: Callable[[State, Array, Array], tuple[State, Array]],
    state: State,
    chunks: Shaped[Array, "M *chunk"],
    axis_name: str = "stage",
) -> tuple[State, Shaped[Array, "M *chunk"]]:
    """All chunks of a sequence through all stages, inside `jax.shard_map`: `M + S - 1` ticks for M chunks and S stages.

    Args:
      stage_fn: `(state, x, chunk) -> (state, y)`: this stage's layers, on chunk number `chunk` (int32; x and y are
        shaped and typed alike). In ticks in which a stage has no chunk, the first and last S - 1 of them, it is -1:
        then state must stay as it is, where that matters (drop what would be written).
      state: any pytree that a stage keeps: its part of the KV cache.
      chunks: `[M, *chunk]`, what enters the first stage; the others ignore it.
      axis_name: the mesh axis of S stages.

    Returns:
      (state, y of the last stage `[M, *chunk]`, the same on all stages). Each tick sends one chunk to the next stage;
      in the end the results go to all, `M * chunk` in one all-reduce. Differentiable if stage_fn is.

    Raises:
      ValueError: chunks have no leading axis, or there are none.

    Source: Mnemosyne, 4.3, figure 9; equation 8: time falls with S, but for S - 1 ticks.
    """
    if chunks.ndim < 1 or chunks.shape[0] == 0:
        raise ValueError(f"chunks must be [M, *chunk] with at least one chunk, got {chunks.shape}")
    stages, index, num_chunks = lax.axis_size(axis_name), lax.axis_index(axis_name), chunks.shape[0]

    def tick(carry: tuple[State, Array], number: Array) -> tuple[tuple[State, Array], Array]:
        state, x = carry
        x = enter_stage(x, chunks[jnp.minimum(number, num_chunks - 1)], axis_name)
        chunk = number - index
        state, y = stage_fn(state, x, jnp.where((chunk >= 0) & (chunk < num_chunks), chunk, -1))
        return (state, y), y

    ticks = jnp.arange(num_chunks + stages - 1, dtype=jnp.int32)
    state, chunks = match_varying((state, chunks), axis_name)
    (state, _), ys = lax.scan(tick, (state, jnp.zeros_like(chunks[0])), ticks)
    # What came out of the last stage, one chunk a tick from tick S - 1 on.
    last = jnp.where(index == stages - 1, ys[stages - 1 :], jnp.zeros_like(ys[stages - 1 :]))
    return state, lax.psum(last, axis_name)
