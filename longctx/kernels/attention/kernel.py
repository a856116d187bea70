"""The implementations of attention by name, and the custom VJP that every exchange between ranks shares."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from longctx.gpu_flags import reserved_multiprocessors
from longctx.kernels.arrays import check_constant
from longctx.kernels.attention import batches
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.reference import reference_attention, reference_backward
from longctx.kernels.attention.rule import AttentionRule, is_added
from longctx.kernels.attention.xla import xla_attention, xla_backward
from longctx.kernels.derivatives import end_reverse_mode
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.operand_dtype import operand_dtype, wide_dtype
from longctx.kernels.partitioning import match_sharding

ATTENTION_STATE = "longctx.attention_state"
"""Name of `out` and `lse` for `jax.checkpoint_policies.save_only_these_names`."""


def mosaic_gpu_attention(*operands: Any) -> tuple[Array, Array]:
    # Importing Pallas takes half a second, so only callers that use it import it.
    from longctx.kernels.attention.mosaic_gpu import mosaic_gpu_attention

    return mosaic_gpu_attention(*operands)


def plan_mosaic_gpu(*arguments: Any) -> Any:
    from longctx.kernels.attention.mosaic_gpu import plan_mosaic_gpu

    return plan_mosaic_gpu(*arguments)


def mosaic_gpu_backward(*operands: Any) -> tuple[Array, ...]:
    from longctx.kernels.attention.mosaic_gpu_backward import mosaic_gpu_backward

    return mosaic_gpu_backward(*operands)


def triton_attention(*operands: Any) -> tuple[Array, Array]:
    from longctx.kernels.attention.triton import triton_attention

    return triton_attention(*operands)


def plan_triton(*arguments: Any) -> Any:
    from longctx.kernels.attention.triton import plan_triton

    return plan_triton(*arguments)


def triton_backward(*operands: Any) -> tuple[Array, ...]:
    from longctx.kernels.attention.triton_backward import triton_backward

    return triton_backward(*operands)


# forward(q, k, v, queries, keys, rule, state, bias) -> (out, lse); those with a plan take
# (q, k, v, queries, keys, rule, plan, state, out_dtype)
# backward(q, k, v, queries, keys, rule, lse, row_terms, d_out, bias) -> (d_q, d_k, d_v), and d_bias of numbers
IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mosaic_gpu": (mosaic_gpu_attention, mosaic_gpu_backward),
    "triton": (triton_attention, triton_backward),
    "xla": (xla_attention, xla_backward),
    "reference": (reference_attention, reference_backward),
}


_ONCE = (
    "gradients of attention are differentiable in forward mode alone: take jax.jvp(jax.grad(f), ...) or "
    'jax.jacfwd(jax.grad(f)), or longctx.kernels.attention of implementation="reference", which has any mode'
)


class Operands(NamedTuple):
    """Arguments of one call: q `[*B, T, N, H]`, k `[*B, S, K, H]`, v `[*B, S, K, Hv]`, tokens `[*B, T]`, `[*B, S]`.

    Batch dimensions of k, v and tokens may be 1 for any of q: all its sequences then share them. k and v may be one
    array `[2, *B, S, K, H]`, which holds both: a ring sends them as one message. `bias` broadcasts to `[*B, N, T, S]`
    and has all these dimensions: numbers to add to scores, whether a query sees a key, or, for the rule's function, the
    numbers of the heads.
    """

    q: Array
    k: Array
    v: Array
    queries: Tokens
    keys: Tokens
    bias: Array | None = None

    @property
    def has_bias_gradient(self) -> bool:
        """Whether bias is an array of numbers to add."""
        return is_added(self.bias)

    @property
    def are_empty(self) -> bool:
        """Whether there is no query or no key."""
        return self.q.size == 0 or self.k.size == 0

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape `[*B, T, N, Hv]` of results."""
        return (*self.q.shape[:-1], self.v.shape[-1])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Attention on one device with its static arguments. Results are float32, or float64 for float64 operands.

    `out_dtype` is the dtype that the caller casts `out` to: an implementation may return that dtype directly.
    `reserved_multiprocessors` are left to what runs beside the kernel on a GPU.
    """

    implementation: str
    rule: AttentionRule
    out_dtype: jnp.dtype | None = None
    reserved_multiprocessors: int = 0

    def beside_hops(self, num_ranks: int) -> "Kernel":
        """The kernel for steps of a ring, of which all but the last have a hop beside them."""
        reserved = 0 if num_ranks == 1 else reserved_multiprocessors()
        return dataclasses.replace(self, reserved_multiprocessors=reserved)

    def forward(
        self, operands: Operands, state: tuple[Array, Array] | None = None, plan: Any = None
    ) -> tuple[Array, Array]:
        """(out `[*B, T, N, Hv]`, lse `[*B, T, N]`) over these keys and, given `state`, over the keys of that state too.

        `plan` is what `plan` of the same operands returned.
        """
        if operands.are_empty:
            if state is not None:
                return state
            q = operands.q
            zeros = jnp.zeros_like(q, wide_dtype(q.dtype), shape=operands.out_shape)
            return zeros, jnp.full_like(zeros[..., 0], -jnp.inf)
        if self.implementation == "reference":  # XLA divides it by itself
            return batches.on_one_batch(self._forward, operands, state, plan)
        check_constant(self.implementation, T=operands.q.shape[-3], S=operands.k.shape[-3])
        return batches.forward(self._forward, operands, state, plan, self.rule.bias is not None)

    def _forward(self, operands: Operands, state: tuple[Array, Array] | None, plan: Any) -> tuple[Array, Array]:
        if self.implementation != "reference":
            check_constant(self.implementation, T=operands.q.shape[-3], S=operands.k.shape[-3])
        forward = IMPLEMENTATIONS[self.implementation][0]
        if self.implementation in ("mosaic_gpu", "triton"):
            out_dtype = jnp.float32 if self.out_dtype is None else self.out_dtype
            if plan is None:
                plan = self.plan(operands.q, operands.k, operands.queries, operands.keys)
            return forward(*operands[:5], self.rule, plan, state, out_dtype)
        return forward(*operands[:5], self.rule, state, operands.bias)

    def plan(
        self, q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, queries: Tokens, keys: Tokens
    ) -> Any:
        """Return what `forward` derives from the types of q and k, tokens and the rule alone; None: nothing."""
        if 0 in (*q.shape, *k.shape):
            return None
        if self.implementation == "triton":
            return plan_triton(q.shape, k.shape, q.dtype, queries, keys, self.rule)
        if self.implementation == "mosaic_gpu":
            return plan_mosaic_gpu(q.shape, k.shape, queries, keys, self.rule, self.reserved_multiprocessors)
        return None

    def backward(self, operands: Operands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, ...]:
        """Return the contribution of these keys to (d_q, d_k, d_v), given lse and `row_terms` over all keys.

        A fourth result is the gradient of a bias of numbers.
        """
        if operands.are_empty:
            parts: list[Any] = [operands.q, operands.k, operands.v, *[operands.bias] * operands.has_bias_gradient]
            return tuple(jnp.zeros_like(x, lse.dtype, shape=x.shape[-operands.q.ndim :]) for x in parts)
        return batches.backward(
            self._backward, operands, lse, row_terms, d_out, has_constants=self.rule.bias is not None
        )

    def _backward(self, operands: Operands, *of_rows: Array) -> tuple[Array, ...]:
        bias = () if operands.bias is None else (operands.bias,)
        return IMPLEMENTATIONS[self.implementation][1](*operands[:5], self.rule, *of_rows, *bias)


@runtime_checkable
class Algorithm(Protocol):
    """A `Kernel` on one device, or an exchange between the kernels of several ranks.

    It holds static arguments only, and is hashable.
    """

    def forward(self, operands: Any) -> tuple[Array, Array]: ...

    def backward(self, operands: Any, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array | None, ...]: ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_with_vjp(algorithm: Algorithm, operands: Any) -> tuple[Array, Array]:
    """`algorithm.forward` with a VJP whose residuals are the operands, out and lse, and no scores.

    `operands` is an `Operands`, or another named tuple that begins with q, k and v.
    """
    return algorithm.forward(operands)


def _save(algorithm: Algorithm, operands: Any) -> Any:
    out, lse = algorithm.forward(operands)
    # Named, so that a policy of jax.checkpoint can keep them: backward then doesn't compute or exchange forward again.
    state = (checkpoint_name(out, ATTENTION_STATE), checkpoint_name(lse, ATTENTION_STATE))
    return state, (operands, *state)


# Where a gradient is taken without `jax.jit`, JAX calls this with arrays: it then compiles once for their shapes.
@kernel_jit("algorithm", inline=True)
def _backward(algorithm: Algorithm, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any]:
    # Without the barrier, common subexpression elimination would keep what backward recomputes or fetches again.
    (operands, out, lse), cotangents = lax.optimization_barrier((saved, cotangents))
    d_out, d_lse = (x.astype(lse.dtype) for x in cotangents)
    # Rounded here, so that both terms of d score are of one d_out: what they differ by would not cancel.
    d_out = d_out.astype(operand_dtype(operands.q.dtype)).astype(lse.dtype)
    # d score = weight * (d_out . v - d_out . out + d_lse): the last two terms don't depend on the key: one per row.
    row_terms = jnp.where(lse == -jnp.inf, 0, d_lse - jnp.sum(d_out * out, -1))
    gradients = end_reverse_mode(algorithm.backward(operands, lse, row_terms, d_out), _ONCE)
    found = operands[:3] if len(gradients) == 3 else (*operands[:3], operands.bias)
    typed = [d if d is None else match_sharding(d.astype(x.dtype), x) for d, x in zip(gradients, found, strict=True)]
    # Other operands are integers and have no gradient, nor have pages of bits.
    missing = (None,) * (len(operands) - len(typed))
    return (type(operands)(*typed[:3], *missing, *typed[3:]),)


attention_with_vjp.defvjp(_save, _backward)
