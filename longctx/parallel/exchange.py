"""Parts that all exchanges share: the check of arguments, gathered positions and segments, states as messages."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from longctx.annotations import Real
from longctx.kernels.attention.kernel import Algorithm, Kernel, Operands, attention_with_vjp
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import (
    Arguments,
    Window,
    check_arrays,
    check_bias,
    check_kernel,
    check_out_dtype,
    check_sinks,
    flatten,
)
from longctx.kernels.attention.rule import BiasFunction
from longctx.kernels.merge import with_sinks
from longctx.kernels.operand_dtype import wide_dtype
from longctx.kernels.partitioning import match_varying


@final
@dataclasses.dataclass(frozen=True)
class BiasOfRank:
    """A function of heads and positions, for ranks that each have `num_heads` of the heads, along a mesh axis."""

    function: BiasFunction
    axis_name: str
    num_heads: int

    def __call__(self, heads: Array, q_positions: Array, kv_positions: Array) -> Array:
        return self.function(heads, q_positions, kv_positions)

    def number(self, heads: Array) -> Array:
        """Return the numbers of heads that are counted from 0 on this rank."""
        return heads + lax.axis_index(self.axis_name) * self.num_heads


class AttentionSpec(NamedTuple):
    """The static arguments of an exchange; None: a default."""

    axis_name: str
    causal: bool
    scale: Real | None
    implementation: str | Sequence[str] | None
    out_dtype: DTypeLike | None
    window: Window | None = None
    logits_soft_cap: Real | None = None
    bias: BiasFunction | None = None

    def check(self, arrays: Arguments) -> tuple[Kernel, Operands, jnp.dtype]:
        """Check one rank's arguments, flatten their batch dimensions and cast them to vary over the axis.

        Raises:
          ValueError, TypeError: an argument is wrong; the message names it.
        """
        axis_name, q = self.axis_name, arrays.q
        check_axis("axis_name", axis_name)
        limited = arrays.q_first is not None or arrays.q_last is not None
        for name, is_needed in (("q_positions", self.causal), ("kv_positions", self.causal or limited)):
            if is_needed and getattr(arrays, name) is None:
                raise ValueError(
                    f"{name} must be given {'when causal' if self.causal else 'with q_first and q_last'}: a rank can't "
                    "tell which tokens its layout gave it (longctx.parallel.shard_positions does)"
                )
        check_bias_function(self.bias)
        operands = flatten(check_arrays(arrays, self.causal))
        bias: Any = check_bias(self.bias, operands.q, operands.k)
        if isinstance(self.bias, BiasOfRank):
            bias = self.bias.number(bias)
        operands = operands._replace(bias=bias)
        kernel = check_kernel(
            q,
            self.causal,
            self.scale,
            self.implementation,
            self.window,
            self.logits_soft_cap,
            arrays.v.shape[-1],
            self.bias,
        )
        check_shards(arrays, axis_name)
        return kernel, match_varying(operands, axis_name), check_out_dtype(self.out_dtype, q.dtype)


def check_axis(argument: str, axis_name: Any) -> None:
    """Check that an argument names a mesh axis of the `jax.shard_map` that this is called in."""
    try:
        num_ranks = lax.axis_size(axis_name) if isinstance(axis_name, str) else 0
    except NameError:
        num_ranks = 0
    if not num_ranks:
        raise ValueError(
            f"{argument} must be a mesh axis of the jax.shard_map that this is called in, got {axis_name!r}"
        )


def check_shards(arrays: Arguments, axis_name: str) -> None:
    """Check that each rank of an axis has keys and values of its own."""
    num_ranks = lax.axis_size(axis_name)
    for name, x in (("k", arrays.k), ("v", arrays.v)):
        if num_ranks > 1 and is_replicated(x, axis_name):
            raise ValueError(
                f"{name} must be a shard of its own on each rank, but its type says that it is replicated over "
                f"{axis_name!r}: its keys would count {num_ranks} times"
            )


def check_bias_function(bias: Any) -> None:
    """Check that a bias is a function, or None."""
    if bias is not None and not callable(bias):
        raise NotImplementedError(
            "bias must be a function of heads and positions where keys are divided over ranks, got an array of scores: "
            "longctx.kernels.attention takes one"
        )


def exchange(
    algorithm: Callable[[Kernel], Algorithm],
    arrays: Arguments,
    spec: AttentionSpec,
    sinks: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Check the arguments, run an algorithm over flat operands, and give its state the shape and dtype of q.

    Args:
      algorithm: made of the kernel of each rank, which runs alone where there is no query or no key.
      sinks: as for `attention`, of this rank's heads; they take part once, after the last merge.
    """
    kernel, operands, out_dtype = spec.check(arrays)
    state = attention_with_vjp(kernel if operands.are_empty else algorithm(kernel), operands)
    return finish(state, arrays.q, out_dtype, sinks)


def finish(state: tuple[Array, Array], q: Array, out_dtype: jnp.dtype, sinks: ArrayLike | None) -> tuple[Array, Array]:
    """Add the sinks to a state of flat batch `[B, T, N, ...]`, and give it the batch dimensions of q and its dtype."""
    out, lse = with_sinks(state, check_sinks(sinks, q))
    return out.reshape(*q.shape[:-1], out.shape[-1]).astype(out_dtype), lse.reshape(q.shape[:-1])


def stack_keys(k: Array, v: Array) -> tuple[Array, ...]:
    """Return k and v as one array, a single message; or as they are where their head sizes differ.

    The new dimension is before `[B, S, K, H]`, and after that of shards, if there is one.
    """
    return (jnp.stack([k, v], -5),) if k.shape == v.shape else (k, v)


@final
@dataclasses.dataclass(frozen=True)
class ByShard:
    """A kernel that attends to shards one by one, as each is sorted by (segment, position) and all of them are not.

    Keys and values have a dimension of shards in front, `[R, B, S, K, H]`, and so have their tokens.
    """

    kernel: Kernel

    def forward(self, operands: Operands, state: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        q, k, v, queries, keys, bias = operands

        def step(state: tuple[Array, Array], shard: Any) -> tuple[tuple[Array, Array], None]:
            kv, keys = shard
            return self.kernel.forward(Operands(q, kv[0], kv[-1], queries, keys, bias), state), None

        if state is None:
            # Zeros made from q, so that they vary over its mesh axes.
            zeros = jnp.zeros_like(q, wide_dtype(q.dtype), shape=operands.out_shape)
            state = (zeros, jnp.full_like(zeros[..., 0], -jnp.inf))
        return lax.scan(step, state, ((k,) if k is v else (k, v), keys))[0]

    def backward(self, operands: Operands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, Array, Array]:
        d_q, d_kv = self.stacked_backward(operands, lse, row_terms, d_out)
        d_k, d_v = jnp.moveaxis(d_kv[0], 1, 0) if len(d_kv) == 1 else d_kv
        return d_q, d_k, d_v

    def stacked_backward(
        self, operands: Operands, lse: Array, row_terms: Array, d_out: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return d_q, and d_k and d_v as `stack_keys` returns them."""
        q, k, v, queries, keys, bias = operands

        def step(d_q: Array, shard: Any) -> tuple[Array, tuple[Array, ...]]:
            kv, keys = shard
            beside = Operands(q, kv[0], kv[-1], queries, keys, bias)
            part, *d_kv = self.kernel.backward(beside, lse, row_terms, d_out)
            return d_q + part, stack_keys(*d_kv)

        return lax.scan(step, jnp.zeros_like(d_out, shape=q.shape), ((k,) if k is v else (k, v), keys))


def is_replicated(x: Array, axis_name: str) -> bool:
    """Whether the type of x says that x is replicated over the axis; under `check_vma=False` no type says so."""
    return not is_varying(x, axis_name) and is_varying(match_varying(x, axis_name), axis_name)


def is_varying(x: Array, axis_name: str) -> bool:
    """Whether the type of x says that x varies over the axis."""
    return axis_name in jax.typeof(x).manual_axis_type.varying


def gather_tokens(tokens: Tokens, axis_name: str) -> Tokens:
    """Gather the tokens of all ranks, `[N, 1 or B, L]` each array, in one message of 4 bytes a number."""
    packed, unpack = pack_tokens(tokens)
    return unpack(jnp.moveaxis(lax.all_gather(packed, axis_name), 0, 1))


def pack_tokens(tokens: Tokens) -> tuple[Array, Callable[[Array], Tokens]]:
    """Pack the arrays of tokens `[1 or B, L]` into one, a single message, and return what unpacks them from it."""
    arrays, tree = jax.tree.flatten(tokens)
    return jnp.stack(jnp.broadcast_arrays(*arrays)), lambda packed: jax.tree.unflatten(tree, packed)


def pack_state(out: Array, lse: Array, num_parts: int) -> Array:
    """Pack a state, split into parts along its first axis, into one array `[num_parts, size]`, sent as one message."""
    return jnp.concatenate([x.reshape(num_parts, x.size // num_parts) for x in (out, lse)], 1)


def unpack_states(packed: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Unpack states `[M, size]` into outs `[M, *shape]` and lses `[M, *shape[:-1]]`."""
    num_parts, size = packed.shape[0], math.prod(shape)
    return packed[:, :size].reshape(num_parts, *shape), packed[:, size:].reshape(num_parts, *shape[:-1])


def part_of_rank(x: Array, axis_name: str, axis: int) -> Any:
    """This rank's heads of an array with all heads along a dimension."""
    size = x.shape[axis] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * size, size, axis)
