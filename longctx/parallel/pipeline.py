"""Sequence pipeline parallelism: chunks of one sequence follow each other densely through the stages.

Stage s works on chunk t - s at tick t. The attention of a chunk in a stage needs the keys and values of earlier chunks
in that stage alone, and the stage has just computed them. So no chunk waits for the previous one to leave the last
stage, as it would in a pipeline of batches (Mnemosyne, 4.3; Medha, 3.3).
"""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Shaped

from longctx.kernels.partitioning import match_varying

State = TypeVar("State")


def enter_stage(
    x: Shaped[Array, "*chunk"], entering: Shaped[Array, "*chunk"], axis_name: str = "stage"
) -> Shaped[Array, "*chunk"]:
    """The input of this stage in this tick, inside `jax.shard_map`, by one permute (asynchronous on GPUs).

    Args:
      x: the output of this stage in the previous tick, `[*chunk]` of any dtype, which goes to the next stage.
      entering: the input of the first stage, of the shape and dtype of x. Other stages ignore it.
      axis_name: the mesh axis of the stages.

    Returns:
      What this stage works on now, `[*chunk]`.

    Source:
      Mnemosyne, 4.3.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.parallel import enter_stage, make_mesh, use_devices
      >>> use_devices(4)
      >>> mesh = make_mesh(stage=4)
      >>> run = jax.shard_map(enter_stage, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"))
      >>> outputs = jnp.array([10, 20, 30, 40])  # of the four stages, in the tick before
      >>> run(outputs, jnp.array([0])).tolist()  # each stage gets what the one before it made, the first the next chunk
      [0, 10, 20, 30]
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
    """Run all chunks of a sequence through all stages, inside `jax.shard_map`, in `M + S - 1` ticks.

    Args:
      stage_fn: `(state, x, chunk) -> (state, y)`: this stage's layers, on chunk number `chunk` (int32; x and y have
        one shape and dtype). `chunk` is -1 in ticks in which the stage has none, some of the first and last S - 1: then
        stage_fn must not change the parts of the state that matter (it drops its writes).
      state: any pytree that a stage keeps: its part of the KV cache.
      chunks: of any dtype, `[M, *chunk]`, the inputs of the first stage; other stages ignore them.
      axis_name: the mesh axis of S stages.

    Returns:
      (state, y of the last stage `[M, *chunk]`, the same on all stages). Each tick sends one chunk to the next stage,
      and one all-reduce of `M * chunk` elements sends the results to all stages. Differentiable if stage_fn is.

    Raises:
      ValueError: chunks have no leading axis, or there are none.

    Source:
      Mnemosyne, 4.3, figure 9; equation 8: the time is divided by S, plus S - 1 ticks.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.parallel import make_mesh, sequence_pipeline, use_devices
      >>> use_devices(4)
      >>> mesh = make_mesh(stage=4)
      >>> def stage_fn(total, x, chunk):  # a layer that adds up all it has seen, as attention reads all earlier chunks
      ...     seen = total + jnp.where(chunk >= 0, x.sum(), 0.0)
      ...     return seen, x + seen
      >>> def local(chunks):
      ...     return sequence_pipeline(stage_fn, jax.lax.pcast(0.0, "stage", to="varying"), chunks)[1]
      >>> run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P()))
      >>> chunks = jnp.ones((3, 2))  # 3 chunks of 2 tokens, through 4 stages in 6 ticks
      >>> run(chunks).tolist()
      [[81.0, 81.0], [297.0, 297.0], [729.0, 729.0]]
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
    # The last stage finishes one chunk a tick from tick S - 1 on.
    last = jnp.where(index == stages - 1, ys[stages - 1 :], jnp.zeros_like(ys[stages - 1 :]))
    return state, lax.psum(last, axis_name)
