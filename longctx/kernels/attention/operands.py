"""Checks the arguments of every attention function and brings them to one form."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels import selection
from longctx.kernels.attention.kernel import IMPLEMENTATIONS, Kernel, Operands
from longctx.kernels.attention.mask import Tokens

Tree = TypeVar("Tree")


def check_operands(
    q: Array,
    k: Array,
    v: Array,
    q_positions: Array | None,
    kv_positions: Array | None,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
    causal: bool,
) -> Operands:
    """Check arrays `[*B, ...]` and flatten them to one batch dimension.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.
    """
    _check_arrays(q, k, v)
    *batch, q_length, _, _ = q.shape
    kv_length = k.shape[-3]
    if causal and q_length != kv_length and q_positions is None:
        raise ValueError(
            f"q_positions must be given when causal and T != S ({q_length} != {kv_length}): "
            "where the queries stand among the keys can't be guessed"
        )
    if causal and q_positions is None and kv_positions is not None:
        raise ValueError("q_positions must be given when causal and kv_positions are")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("q_segment_ids and kv_segment_ids must be given both or neither")
    queries = _tokens("q", q_positions, q_segment_ids, tuple(batch), q_length)
    keys = _tokens("kv", kv_positions, kv_segment_ids, tuple(batch), kv_length)
    flat_q, flat_k, flat_v = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (q, k, v))
    return Operands(flat_q, flat_k, flat_v, queries, keys)


def check_kernel(q: Array, causal: bool, scale: float | None, implementation: str | None) -> Kernel:
    """Check the static arguments, fill in defaults and choose the implementation."""
    check_implementation(implementation, IMPLEMENTATIONS)
    implementation = selection.choose(implementation, selection.Case(q.dtype, q.shape[-1]))
    return Kernel(implementation, bool(causal), check_scale(scale, q.shape[-1]))


def check_implementation(implementation: str | None, known: Iterable[str]) -> None:
    if implementation is not None and implementation not in list(known):
        raise ValueError(f"implementation must be None or one of {sorted(known)}, got {implementation!r}")


def check_scale(scale: float | None, head_size: int) -> float:
    if scale is None:
        scale = head_size**-0.5
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    return float(scale)


def check_out_dtype(out_dtype: DTypeLike | None, default: DTypeLike) -> jnp.dtype:
    dtype = jnp.dtype(default if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"out_dtype must be a floating-point type, got {dtype}")
    return dtype


def match_varying(operands: Tree, axis_name: str | None = None) -> Tree:
    """Inside `shard_map`, cast all arrays of a tree to vary over the union of their mesh axes (and `axis_name`).

    Loop carries need it. Callers cast outside the custom VJP, so that the gradient of a replicated operand is summed
    over the mesh.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands)))
    if axis_name is not None:
        axes |= {axis_name}

    def cast(x: Array) -> Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, operands)


def _check_arrays(q: Array, k: Array, v: Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} must be a jax.Array, got {type(x).__name__}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if x.dtype.itemsize < 2:
            raise TypeError(f"{name} must have 16 bits or more, got {x.dtype}")
        if x.ndim < 3:
            raise ValueError(f"{name} must have a shape [*batch, length, heads, head size], got {x.shape}")
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, got {q.dtype} and {name} of {x.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {k.shape} and {v.shape}")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"k must have the batch dimensions of q, {q.shape[:-3]}, got {k.shape[:-3]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k must have the head size of q, {q.shape[-1]}, got {k.shape[-1]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if 0 in (heads, kv_heads, q.shape[-1]) or heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's heads, and a head size over 0: {q.shape} and {k.shape}")


def _tokens(side: str, positions: Array | None, segments: Array | None, batch: tuple[int, ...], length: int) -> Tokens:
    """Positions and segments as int32 `[1 or batch, length]`."""

    def normalise(name: str, x: Array | None, default: Array) -> Array:
        if x is None:
            return default[None]
        x = check_int32(name, x)
        if x.shape not in ((length,), (*batch, length)):
            raise ValueError(f"{name} must have the shape {(length,)} or {(*batch, length)}, got {x.shape}")
        return x.reshape(math.prod(x.shape[:-1]), length)

    return Tokens(
        normalise(f"{side}_positions", positions, jnp.arange(length, dtype=jnp.int32)),
        normalise(f"{side}_segment_ids", segments, jnp.zeros(length, jnp.int32)),
    )


def check_int32(name: str, x: Array) -> Array:
    """Convert integers to int32. Values outside its range raise ValueError unless x is traced."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    if x.size and not isinstance(x, jax.core.Tracer) and x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
        low, high = int(x.min()), int(x.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{name} must fit into int32, got values from {low} to {high}")
    return jnp.asarray(x).astype(jnp.int32)
