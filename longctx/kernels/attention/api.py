"""The public `attention`: checks at the door, defaults, and the choice of an implementation."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.reference import reference_attention
from longctx.kernels.attention.xla import xla_attention

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "xla": xla_attention,
    "reference": reference_attention,
}


def attention(
    q: Array,
    k: Array,
    v: Array,
    q_positions: Array | None = None,
    kv_positions: Array | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Array, Array]:
    """Exact softmax attention that also returns its state, so that parts can be merged (`merge_states`).

    A query sees a key when their segments are equal and not negative and, if `causal`, the key's position is not
    after the query's. So one rule serves a cached prefix, packed sequences, padding and any sharding of a sequence.
    Any lengths, any order of tokens; work is saved where keys are sorted by (segment, position).

    Args:
      q: queries `[*B, T, N, H]`, floating point.
      k, v: keys and values `[*B, S, K, H]`, N a multiple of K (grouped-query attention, nothing is repeated).
      q_positions, kv_positions: absolute positions, integers, `[T]` or `[*B, T]` and `[S]` or `[*B, S]`. Default:
        0, 1, 2, ...; where that would be a guess, causal with T != S or with `kv_positions`, give `q_positions`.
      q_segment_ids, kv_segment_ids: integers of the same shapes, both or neither; negative means padding.
      causal: whether positions matter.
      scale: factor on the scores, default `H ** -0.5`.
      implementation: `"xla"` (blockwise, memory linear in T + S) or `"reference"` (dense, the oracle); None picks
        the best that supports the case, today `"xla"`.
      out_dtype: dtype of `out`, default that of `q`. Take float32 for parts that are still to be merged.

    Returns:
      out `[*B, T, N, H]`, and lse `[*B, T, N]`: float32 (float64 for float64 inputs), natural log of the sum of
      exp(score). A query that sees nothing has `out = 0`, `lse = -inf`. Scores, softmax and sums are computed in
      float32 or wider. Both results are differentiable in q, k and v, once and in reverse mode; for `jax.jvp` and
      second derivatives there is `"reference"`. A row of scores all below -1e30 counts as empty in `"xla"`.

    Raises:
      ValueError, TypeError: an argument has the wrong shape, dtype or value; the message names it.

    Source: online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022); positions as masks after
    the context parallelism paper, section 3.5.
    """
    if implementation is not None and implementation not in list(IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None or one of {sorted(IMPLEMENTATIONS)}, got {implementation!r}")
    _check_arrays(q, k, v)
    *batch, q_length, _, head_size = q.shape
    kv_length = k.shape[-3]
    if scale is None:
        scale = head_size**-0.5
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
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

    out_dtype = q.dtype if out_dtype is None else jnp.dtype(out_dtype)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(f"out_dtype must be a floating-point type, got {out_dtype}")
    if q.size == 0 or k.size == 0:
        # Nobody to ask, or nothing to see.
        lse = jnp.full(q.shape[:-1], -jnp.inf, jnp.promote_types(q.dtype, jnp.float32))
        return jnp.zeros(q.shape, out_dtype), lse
    compute = IMPLEMENTATIONS[implementation or "xla"]
    flat = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    out, lse = compute(*_vary_alike(*flat, queries, keys), causal, float(scale))
    return out.reshape(q.shape).astype(out_dtype), lse.reshape(q.shape[:-1])


def _vary_alike(*operands: Array | Tokens) -> tuple[Array | Tokens, ...]:
    """Inside `shard_map`, cast all operands to vary over the union of their mesh axes, as loop carries must.

    Outside the custom VJP, so that the gradient of an operand that was replicated is summed over the mesh.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands)))

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
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got {x.dtype}")
        if x.shape not in ((length,), (*batch, length)):
            raise ValueError(f"{name} must have the shape {(length,)} or {(*batch, length)}, got {x.shape}")
        if x.size and not isinstance(x, jax.core.Tracer) and x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
            low, high = int(x.min()), int(x.max())
            if low < -(2**31) or high >= 2**31:
                raise ValueError(f"{name} must fit into int32, got values from {low} to {high}")
        return jnp.asarray(x).astype(jnp.int32).reshape(math.prod(x.shape[:-1]), length)

    return Tokens(
        normalise(f"{side}_positions", positions, jnp.arange(length, dtype=jnp.int32)),
        normalise(f"{side}_segment_ids", segments, jnp.zeros(length, jnp.int32)),
    )
