"""`AttentionPlan`: what attention derives from shapes, positions and segments alone, once for all layers of a model."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Integer, Nested
from longctx.kernels.arrays import check_array
from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import (
    Arguments,
    Implementation,
    Window,
    check_kernel,
    check_masks,
    check_types,
    flatten_tokens,
)
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.selection import check_value_size


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("queries", "keys", "data"),
    meta_fields=("implementation", "causal", "window", "q_shape", "k_shape"),
)
@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Result of `plan_attention`, for `attention(..., plan=)`. It is a pytree, so functions under jit may take it.

    Attributes:
      implementation: which it serves.
      causal, window: as for `attention`.
      q_shape, k_shape: of the queries `[*B, T, N, H]` and keys `[*B, S, K, H]` that it serves.
      queries, keys, data: positions, segments, and what the implementation made of them; for its own use.

    Examples:
      >>> import jax
      >>> from longctx.kernels.attention import plan_attention
      >>> q = jax.ShapeDtypeStruct((6, 8, 64), "float32")
      >>> k = jax.ShapeDtypeStruct((6, 2, 64), "float32")
      >>> plan = plan_attention(q, k, implementation="reference")
      >>> plan.implementation, plan.q_shape
      ('reference', (6, 8, 64))
    """

    implementation: str
    causal: bool
    window: tuple[int | None, int | None]
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    queries: Tokens
    keys: Tokens
    data: Any


class PlannedOperands(NamedTuple):
    """`Operands`, and what `Kernel.plan` returned for them."""

    q: Array
    k: Array
    v: Array
    queries: Tokens
    keys: Tokens
    plan: Any


@dataclasses.dataclass(frozen=True)
class PlannedKernel:
    """The `Algorithm` of a kernel with a plan."""

    kernel: Kernel

    def forward(self, operands: PlannedOperands) -> tuple[Array, Array]:
        return self.kernel.forward(Operands(*operands[:5]), plan=operands.plan)

    def backward(self, operands: PlannedOperands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, ...]:
        return self.kernel.backward(Operands(*operands[:5]), lse, row_terms, d_out)


def plan_attention(
    q: Float[ArrayLike, "*B T N H"] | jax.ShapeDtypeStruct,
    k: Float[ArrayLike, "*B S K H"] | jax.ShapeDtypeStruct,
    q_positions: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_positions: Int[ArrayLike, "... S"] | Nested | None = None,
    q_segment_ids: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_segment_ids: Int[ArrayLike, "... S"] | Nested | None = None,
    causal: bool = True,
    window: Window | None = None,
    implementation: Implementation | None = None,
    *,
    q_first: Int[ArrayLike, "... T"] | Nested | None = None,
    q_last: Int[ArrayLike, "... T"] | Nested | None = None,
    value_size: Integer | None = None,
) -> AttentionPlan:
    """Derive from positions and segments what `attention` needs, once for all calls with the same ones.

    Without a plan each call derives it again: with "mosaic_gpu" some 12 to 25 small kernels on the GPU, which XLA does
    not move out of a loop over layers by itself; with a plan at most 3 remain. Gradients derive their own part.

    Args:
      q, k: queries `[*B, T, N, H]` and keys `[*B, S, K, H]`, of which only shapes and dtypes are read, or
        their types (`jax.ShapeDtypeStruct`).
      q_positions, kv_positions, q_segment_ids, kv_segment_ids, causal, window: as for `attention`. The plan holds them.
      implementation: as for `attention`; the plan serves this one alone.
      q_first, q_last: as for `attention`; the plan holds them.
      value_size: the head size of values, by which the implementation is chosen. None: that of keys.

    Returns:
      An `AttentionPlan` for calls with these shapes, positions and segments.

    Raises:
      ValueError, TypeError, NotImplementedError: as `attention`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels import attention, plan_attention
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> q, k, v = (jax.random.normal(key, (6, heads, 64)) for key, heads in zip(keys, (8, 2, 2)))
      >>> positions = jnp.arange(6)
      >>> def layers(q, k, v):  # of a model: `[layers, T, heads, H]`
      ...     plan = plan_attention(q[0], k[0], positions, positions)  # once, before the loop over layers
      ...     return jax.lax.map(lambda qkv: attention(*qkv, plan=plan)[0], (q, k, v))
      >>> out = jax.jit(layers)(*(jnp.stack([x, -x]) for x in (q, k, v)))
      >>> bool(jnp.allclose(out[0], attention(q, k, v)[0], atol=1e-5))
      True
    """
    q_type, k_type = _type("q", q), _type("k", k)
    check_types(q_type, k_type, k_type)
    masks = q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last
    checked = check_masks(Arguments(q_type, k_type, k_type, *masks), causal)
    size = check_value_size(value_size, q_type.shape[-1])
    kernel = check_kernel(q_type, causal, None, implementation, window, value_size=size)
    return _plan(kernel, q_type, k_type, checked[3:])


@kernel_jit("kernel", "q", "k", inline=True)
def _plan(kernel: Kernel, q: Any, k: Any, masks: tuple[Any, ...]) -> AttentionPlan:
    queries, keys = flatten_tokens(Arguments(q, k, k, *masks))
    flat_q, flat_k = (jax.ShapeDtypeStruct((math.prod(x.shape[:-3]), *x.shape[-3:]), x.dtype) for x in (q, k))
    data = kernel.plan(flat_q, flat_k, queries, keys)
    return AttentionPlan(
        kernel.implementation, kernel.rule.causal, kernel.rule.window, q.shape, k.shape, queries, keys, data
    )


def _type(name: str, x: Any) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        x = check_array(name, x)
    return jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype))
