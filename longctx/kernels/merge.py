"""Exact merging of attention states of disjoint key sets (context parallelism paper, appendix B)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import ArrayLike, Float

from longctx.kernels.arrays import check_array, check_floating


def merge_states(
    outs: Float[ArrayLike, "*states H"], lses: Float[ArrayLike, "*states"], axis: int = 0
) -> tuple[Float[Array, "... H"], Float[Array, "..."]]:
    """Merge stacked attention states into the state over the union of their keys.

    Merging many partial results in bf16 adds an error per merge: keep them float32 until the last one
    (`attention(..., out_dtype=jnp.float32)`). Outside of `jax.jit` a call compiles once for its shapes.

    Args:
      outs: normalised attention outputs, floating point `[..., M, ..., T, N, H]`, M states along `axis`.
      lses: their log-sum-exp, natural log, float32, `outs.shape` without the last dimension.
        `-inf` marks a query that saw no key, and so does `inf`, as in FlashAttention 2 and vLLM; its `out` must be
        finite, and has no weight.
      axis: where the states are stacked, counted in `lses` (so never the head size).

    Returns:
      `(out, lse)` without `axis`: out `[..., T, N, H]` in the dtype of `outs`, computed in float32 (float64 for
      float64), lse `[..., T, N]`. A query empty in every state gives `out = 0`, `lse = -inf`, with gradients zero and
      never NaN.

    Raises:
      ValueError: the shapes or `axis` don't fit, or there is no state to merge.
      TypeError: outs or lses are no arrays, outs are not floating point, or lses are not float32 (or float64).

    Source:
      Context parallelism paper, appendix B.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels import attention, merge_states
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> q, k, v = (jax.random.normal(key, (6, heads, 64)) for key, heads in zip(keys, (8, 2, 2)))
      >>> out, lse = attention(q, k, v, causal=False)
      >>> states = [attention(q, k[part::3], v[part::3], causal=False) for part in range(3)]  # a third of the keys each
      >>> outs, lses = map(jnp.stack, zip(*states))
      >>> merged, merged_lse = merge_states(outs, lses)
      >>> bool(jnp.allclose(merged, out, atol=1e-5)), bool(jnp.allclose(merged_lse, lse, atol=1e-5))
      (True, True)
    """
    outs, lses = check_array("outs", outs), check_array("lses", lses)
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"lses must have the shape of outs without its last axis, {outs.shape[:-1]}: {lses.shape}")
    if not -lses.ndim <= axis < lses.ndim:
        raise ValueError(f"axis must index one of the {lses.ndim} axes of lses, got {axis}")
    if lses.shape[axis] == 0:
        raise ValueError(f"lses must stack at least one state along axis {axis}, got {lses.shape}")
    _check_types("outs", outs, "lses", lses)
    return _merge_states(outs, lses, axis % lses.ndim)


def _check_types(out_name: str, out: Array, lse_name: str, lse: Array) -> None:
    check_floating(out_name, out.dtype)
    if lse.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"{lse_name} must be float32, got {lse.dtype}")


@functools.partial(jax.jit, static_argnames="axis", inline=True)
def _merge_states(outs: Array, lses: Array, axis: int) -> tuple[Array, Array]:
    lses = jnp.where(lses == jnp.inf, -jnp.inf, lses)
    # The peak shifts all exponentials and cancels, so it needs no gradient.
    peak = lax.stop_gradient(jnp.max(lses, axis, keepdims=True))
    empty = peak == -jnp.inf
    peak = jnp.where(empty, 0, peak)
    weights = jnp.exp(lses - peak)
    total = jnp.where(empty, 1, jnp.sum(weights, axis, keepdims=True))
    dtype = np.promote_types(outs.dtype, lses.dtype)
    out = jnp.sum(outs.astype(dtype) * (weights / total)[..., None].astype(dtype), axis).astype(outs.dtype)
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
    return out, jnp.squeeze(lse, axis)


def with_sinks(state: tuple[Array, Array], sinks: Array | None) -> tuple[Array, Array]:
    """Return the state in which each head's sink `[N]` takes part in the softmax, as a key whose value is 0.

    None: there are no sinks.
    """
    return state if sinks is None else _with_sinks(*state, sinks)


@functools.partial(jax.jit, inline=True)
def _with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    sinks = jnp.broadcast_to(sinks.astype(lse.dtype), lse.shape)
    peak = lax.stop_gradient(jnp.maximum(lse, sinks))
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    weight = jnp.exp(lse - peak)
    total = weight + jnp.exp(sinks - peak)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    out = out * (weight / total)[..., None].astype(out.dtype)
    return out, jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))


def merge_state(
    out_a: Float[ArrayLike, "*B T N H"],
    lse_a: Float[ArrayLike, "*B T N"],
    out_b: Float[ArrayLike, "*B T N H"],
    lse_b: Float[ArrayLike, "*B T N"],
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T N"]]:
    """Merge two attention states: `merge_states` for a pair.

    Args:
      out_a, out_b: normalised attention outputs, floating point `[*B, T, N, H]`, of one shape.
      lse_a, lse_b: float32 `[*B, T, N]`, natural log, `-inf` or `inf` where a query saw no key.

    Returns:
      `(out, lse)` over the keys of both: out `[*B, T, N, H]` in the promoted dtype of `out_a` and `out_b`, lse
      `[*B, T, N]` float32.

    Raises:
      ValueError: the shapes differ.
      TypeError: one is no array, an out is not floating point, or an lse is not float32 (or float64): of fewer bits,
        it has lost what the weights depend on.

    Source:
      Context parallelism paper, appendix B.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels import attention, merge_state
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> q, k, v = (jax.random.normal(key, (6, heads, 64)) for key, heads in zip(keys, (8, 2, 2)))
      >>> prefix = attention(q, k[:4], v[:4], causal=False)  # a state `(out, lse)`
      >>> rest = attention(q, k[4:], v[4:], causal=False)
      >>> out, lse = merge_state(*prefix, *rest)
      >>> bool(jnp.allclose(out, attention(q, k, v, causal=False)[0], atol=1e-5))
      True
      >>> out, lse = merge_state(*prefix, jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf))  # of no keys
      >>> bool((out == prefix[0]).all())
      True
    """
    out_a, out_b = check_array("out_a", out_a), check_array("out_b", out_b)
    lse_a, lse_b = check_array("lse_a", lse_a), check_array("lse_b", lse_b)
    for name, a, b in (("out", out_a, out_b), ("lse", lse_a, lse_b)):
        if a.shape != b.shape:
            raise ValueError(f"{name}_a and {name}_b must have one shape, got {a.shape} and {b.shape}")
    _check_types("out_a", out_a, "lse_a", lse_a)
    _check_types("out_b", out_b, "lse_b", lse_b)
    return _merge_state(out_a, lse_a, out_b, lse_b)


@functools.partial(jax.jit, inline=True)
def _merge_state(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    return merge_states(jnp.stack([out_a, out_b]), jnp.stack([lse_a, lse_b]))
