"""What the exchanges share: the door, and the way round a ring."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import check_kernel, check_operands, check_out_dtype, vary_alike


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What is static about one call: the mesh axis that is exchanged over, and what each rank computes."""

    axis_name: str
    kernel: Kernel

    @property
    def num_ranks(self) -> int:
        return lax.axis_size(self.axis_name)

    def shift(self, *arrays: Array) -> tuple[Array, ...]:
        """Every rank's arrays to the next rank, in one message.

        XLA's GPU backend has one permute in flight at a time and joins several into one only up to 30 MiB or so: of
        two long ones, the second would wait for the first, and no step would hide it.
        """
        n = self.num_ranks
        permutation = [(rank, (rank + 1) % n) for rank in range(n)]
        words = [_to_words(x, arrays) for x in arrays]
        message = words[0] if len(words) == 1 else jnp.concatenate([x.ravel() for x in words])
        arrived = lax.ppermute(message, self.axis_name, permutation)
        if len(words) == 1:
            return (_from_words(arrived, arrays[0]),)
        parts = jnp.split(arrived, np.cumsum([x.size for x in words])[:-1])
        return tuple(_from_words(part.reshape(x.shape), y) for part, x, y in zip(parts, words, arrays, strict=True))

    def tokens_by_source(self, tokens: Tokens) -> Callable[[int], Tokens]:
        """The tokens of so many ranks back: all are gathered at once, being 8 bytes each, and one's own are at hand."""
        if self.num_ranks == 1:
            return lambda hop: tokens
        gathered = lax.all_gather(jnp.stack(jnp.broadcast_arrays(*tokens)), self.axis_name)
        return lambda hop: Tokens(*gathered[self.source(hop)]) if hop else tokens

    def source(self, hop: int) -> Array:
        """Whose block is here after that many hops."""
        return (lax.axis_index(self.axis_name) - hop) % self.num_ranks

    def ring(self, block: Array, tokens: Tokens, step: Callable[[Any, Array, Tokens, Array], Any]) -> Any:
        """Fold `state = step(state, block, tokens, source)` over all ranks' blocks, from None and one's own block on.

        N - 1 permutes, each issued before the step that hides it. Without the barrier a compiler issues them all at
        once, holds N blocks, and hides the last alone.
        """
        state, tokens_of = None, self.tokens_by_source(tokens)
        for hop in range(self.num_ranks):
            is_last = hop == self.num_ranks - 1
            arriving = (block,) if is_last else self.shift(block)
            state = step(state, block, tokens_of(hop), self.source(hop))
            if not is_last:
                (block,), state = lax.optimization_barrier((arriving, state))
        return state

    def ring_and_back(
        self,
        block: tuple[Array, ...],
        tokens: Tokens,
        step: Callable[[Any, tuple[Array, ...], Tokens], tuple[Any, Array]],
    ) -> tuple[Any, Array]:
        """Fold `state, share = step(state, block, tokens)` likewise; every block's owner gets the sum of its shares.

        The sum goes round with the blocks, one hop behind its own, so that steps hide both, and last goes home. N - 1
        messages hold a block and N - 1 a sum.
        """
        state: Any = None
        own: Any = None
        total: Any = None
        tokens_of = self.tokens_by_source(tokens)
        for hop in range(self.num_ranks):
            is_last = hop == self.num_ranks - 1
            leaving = (*(() if is_last else block), *(() if total is None else (total,)))
            arriving = self.shift(*leaving) if leaving else ()
            state, share = step(state, block, tokens_of(hop))
            if hop == 0:
                own = share
            else:
                total = share if total is None else arriving[-1] + share
            if not is_last:
                block, state, own, total = lax.optimization_barrier((arriving[: len(block)], state, own, total))
        return state, own if total is None else own + self.shift(total)[0]


def _to_words(x: Array, message: tuple[Array, ...]) -> Array:
    """As what a message of several dtypes is made of; of one, as it is."""
    return x if len({y.dtype for y in message}) == 1 else lax.bitcast_convert_type(x, jnp.uint16)


def _from_words(words: Array, like: Array) -> Array:
    return words if words.dtype == like.dtype else lax.bitcast_convert_type(words, like.dtype)


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
