"""What the exchanges share: the door, and the way round a ring."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.operands import check_kernel, check_operands, check_out_dtype, vary_alike


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What is static about one call: the mesh axis that is exchanged over, and what each rank computes."""

    axis_name: str
    kernel: Kernel

    @property
    def num_ranks(self) -> int:
        return lax.axis_size(self.axis_name)

    def shift(self, tree: Any) -> Any:
        """Every rank's tree to the next rank, in one permute."""
        n = self.num_ranks
        return lax.ppermute(tree, self.axis_name, [(rank, (rank + 1) % n) for rank in range(n)])

    def ring(self, block: Any, step: Callable[[Any, Any, Array], Any]) -> Any:
        """Fold `state = step(state, block, source)` over all ranks' blocks, from None and one's own block on.

        N - 1 permutes, each issued before the step that hides it. Without the barrier a compiler issues them all at
        once, holds N blocks, and hides none behind a step.
        """
        state, rank = None, lax.axis_index(self.axis_name)
        for hop in range(self.num_ranks):
            is_last = hop == self.num_ranks - 1
            arriving = block if is_last else self.shift(block)
            state = step(state, block, (rank - hop) % self.num_ranks)
            if not is_last:
                block, state = lax.optimization_barrier((arriving, state))
        return state

    def ring_and_back(self, block: Any, step: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Fold `state, share = step(state, block)` likewise; every block's owner gets the sum of its shares.

        The sum follows its block round the ring one hop behind, so that its permutes too are hidden by a step, but
        for the last, which takes it home. N - 1 permutes of blocks and N - 1 of sums.
        """
        state: Any = None
        own: Any = None
        total: Any = None
        for hop in range(self.num_ranks):
            is_last = hop == self.num_ranks - 1
            arriving = block if is_last else self.shift(block)
            arriving_total = None if total is None else self.shift(total)
            state, share = step(state, block)
            if hop == 0:
                own = share
            else:
                total = share if arriving_total is None else add(arriving_total, share)
            if not is_last:
                block, state, own, total = lax.optimization_barrier((arriving, state, own, total))
        return state, own if total is None else add(own, self.shift(total))


def add(a: Any, b: Any) -> Any:
    """Leaf by leaf; None is nothing yet."""
    return b if a is None else jax.tree.map(jnp.add, a, b)


def pack(out: Array, lse: Array, num_parts: int) -> Array:
    """A state, cut into parts along its first axis, as one array `[num_parts, size]`: one message for both."""
    return jnp.concatenate([out.reshape(num_parts, -1), lse.reshape(num_parts, -1)], 1)


def unpack(packed: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Packed states `[M, size]` -> outs `[M, *shape]`, lses `[M, *shape[:-1]]`."""
    size = math.prod(shape)
    return packed[:, :size].reshape(-1, *shape), packed[:, size:].reshape(-1, *shape[:-1])


def enter(
    q: Array,
    k: Array,
    v: Array,
    q_positions: Array | None,
    kv_positions: Array | None,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
    axis_name: str,
    causal: bool,
    scale: float | None,
    implementation: str | None,
    out_dtype: DTypeLike | None,
) -> tuple[Kernel, Operands, jnp.dtype]:
    """The door of every exchange: arguments of one rank checked, flattened and cast to vary over the axis."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be a mesh axis of the jax.shard_map that this is called in, got {axis_name!r}"
        ) from None
    for name, positions in (("q_positions", q_positions), ("kv_positions", kv_positions)):
        if causal and positions is None:
            raise ValueError(
                f"{name} must be given when causal: a rank can't tell which tokens its layout gave it "
                "(longctx.parallel.shard_positions does)"
            )
    operands = check_operands(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, causal)
    kernel = check_kernel(q.shape[-1], causal, scale, implementation)
    return kernel, vary_alike(operands, axis_name), check_out_dtype(out_dtype, q.dtype)


def leave(state: tuple[Array, Array], q: Array, out_dtype: jnp.dtype) -> tuple[Array, Array]:
    """A state `[B, T, N, ...]` in the batch dimensions of q."""
    out, lse = state
    return out.reshape(q.shape).astype(out_dtype), lse.reshape(q.shape[:-1])
