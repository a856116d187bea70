"""Ulysses: an all-to-all turns shards of tokens into shards of heads, and another one returns the results."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels.attention.kernel import Algorithm, Operands, attention_with_vjp
from longctx.kernels.attention.operands import Arguments, Implementation, Window, check_sinks
from longctx.kernels.attention.rule import BiasFunction
from longctx.kernels.merge import with_sinks
from longctx.kernels.operand_dtype import wide_dtype
from longctx.kernels.partitioning import match_varying
from longctx.parallel.cost import kv_head_copies
from longctx.parallel.exchange import (
    AttentionSpec,
    ByShard,
    check_axis,
    check_shards,
    finish,
    gather_tokens,
    part_of_rank,
)
from longctx.parallel.pass_kv import PassKV


def ulysses_attention(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    q_positions: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_positions: Int[ArrayLike, "... S"] | Nested | None = None,
    q_segment_ids: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_segment_ids: Int[ArrayLike, "... S"] | Nested | None = None,
    *,
    q_first: Int[ArrayLike, "... T"] | Nested | None = None,
    q_last: Int[ArrayLike, "... T"] | Nested | None = None,
    axis_name: str = "context",
    ring_axis: str | None = None,
    causal: bool = True,
    window: Window | None = None,
    sinks: Float[ArrayLike, "N"] | None = None,
    logits_soft_cap: Real | None = None,
    bias: BiasFunction | None = None,
    scale: Real | None = None,
    implementation: Implementation | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Attention of this rank's queries to the keys of all ranks, computed with all tokens and a part of the heads.

    Arguments, results and errors are those of `ring_pass_kv`, and so is what it computes. An all-to-all gives each of R
    ranks `N / R` query heads of all tokens, and the KV heads that these need: `K / R` if R divides K, one if K divides
    R (each is sent to `R / K` ranks), else `N / g` in all, where g divides both `N / R` and `N / K`. Another all-to-all
    returns the results. All ranks have equal work in any layout.

    On the wire, each rank sends `(R - 1) / R * B * (2 * T * N + 2 * S * K') * H * e` bytes of q, k, v and out for e
    bytes an element, where K' counts KV heads with their copies, `(R - 1) / R * B * T * N * 4` of lse if it is used,
    and `(R - 1) * (T + S) * 8` of positions and segments: two all-gathers, an all-to-all there and one or two back. No
    attention hides them. Backward sends the same without positions and segments; gradients of the copies of a KV head
    are summed in the dtype of k. A ring sends `(R - 1) * B * 2 * S * K * H * e`, which grows with R.

    Memory: a rank's tokens once more, with the copies of KV heads. The residuals are q, k, v, out and lse as
    exchanged: all tokens with a part of the heads.

    With `ring_axis` (USP) these ranks are groups, between which keys and values of a rank's heads travel round a ring,
    as in `ring_pass_kv`: for groups within a host, with the ring across hosts.

    Args:
      q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last: as for `ring_pass_kv`.
      axis_name: the mesh axis of R ranks, which divides the N query heads.
      ring_axis: the mesh axis of the ring; tokens are sharded over both axes. None: there is no ring.
      causal, window, sinks, logits_soft_cap, scale, implementation, out_dtype: as for `longctx.kernels.attention`.
      bias: as for `longctx.kernels.attention`, a function alone; its heads are those of q, from 0.

    Returns:
      (out `[*B, T, N, Hv]`, lse `[*B, T, N]` float32) of this rank's queries, as of `ring_pass_kv`.

    Raises:
      ValueError, TypeError: as for `ring_pass_kv`; or the ranks don't divide the query heads.

    Source:
      DeepSpeed-Ulysses (Jacobs et al. 2023); USP (Fang and Zhao 2024).

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.kernels import attention
      >>> from longctx.parallel import make_mesh, ulysses_attention, use_devices
      >>> use_devices(4)
      >>> mesh = make_mesh(context=4)
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> q, k, v = (jax.random.normal(key, (32, heads, 16)) for key, heads in zip(keys, (8, 2, 2)))  # 32 tokens
      >>> def local(q, k, v, positions):  # on each device, which computes 2 of 8 query heads
      ...     return ulysses_attention(q, k, v, positions, positions)
      >>> run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("context"), out_specs=P("context")))
      >>> out, lse = run(q, k, v, jnp.arange(32))
      >>> bool(jnp.allclose(out, attention(q, k, v)[0], atol=1e-5))
      True
    """
    arrays = Arguments(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last)
    spec = AttentionSpec(axis_name, causal, scale, implementation, out_dtype, window, logits_soft_cap, bias)
    kernel, operands, out_dtype = spec.check(arrays)
    num_ranks, num_heads = lax.axis_size(axis_name), q.shape[-2]
    if ring_axis is not None:
        check_axis("ring_axis", ring_axis)
        if ring_axis == axis_name:
            raise ValueError(f"ring_axis must be another mesh axis than axis_name, got {ring_axis!r}")
        check_shards(arrays, ring_axis)
        operands = match_varying(operands, ring_axis)
    if num_heads % num_ranks:
        raise ValueError(f"the {num_ranks} ranks of axis_name {axis_name!r} must divide q's {num_heads} heads")
    if operands.are_empty or (num_ranks == 1 and ring_axis is None):
        return finish(attention_with_vjp(kernel, operands), q, out_dtype, sinks)

    if ring_axis is None:
        algorithm: Algorithm = ByShard(kernel)
    else:
        size = lax.axis_size(ring_axis)
        algorithm = PassKV(ring_axis, ByShard(kernel.beside_hops(size)), tuple(range(size)))
    state = attention_with_vjp(algorithm, _to_heads(operands, axis_name))
    sinks = check_sinks(sinks, q)
    if sinks is not None:
        state = with_sinks(state, part_of_rank(match_varying(sinks, axis_name), axis_name, 0))
    out, lse = state
    out, lse = (lax.all_to_all(x, axis_name, 1, 2, tiled=True) for x in (out.astype(out_dtype), lse))
    return out.reshape(*q.shape[:-1], out.shape[-1]), lse.reshape(q.shape[:-1])


def _to_heads(operands: Operands, axis_name: str) -> Operands:
    """Exchange tokens for heads: q `[B, R * T, N / R, H]` of all tokens, and k, v and keys as R shards."""
    q, k, v, queries, keys, bias = operands
    copies = kv_head_copies(q.shape[2], k.shape[2], lax.axis_size(axis_name))
    q, k, v = _exchange_heads((q, *(_copy_heads(x, copies) for x in (k, v))), axis_name)
    queries = jax.tree.map(_join, gather_tokens(queries, axis_name))
    if bias is not None:
        bias = part_of_rank(bias, axis_name, 1)
    return Operands(_join(q), k, v, queries, gather_tokens(keys, axis_name), bias)


def _copy_heads(x: Array, copies: int) -> Array:
    """Repeat the heads of `[B, S, K, H]`. Gradients of copies are summed in float32, to which x is cast for them."""
    return x if copies == 1 else jnp.repeat(x.astype(wide_dtype(x.dtype)), copies, 2).astype(x.dtype)


def _exchange_heads(arrays: Sequence[Array], axis_name: str) -> list[Array]:
    """Send each rank its heads of arrays `[B, T, N, H]`, in one message: `[R, B, T, N / R, H]`, by sender."""
    n = lax.axis_size(axis_name)
    parts = [jnp.moveaxis(x.reshape(*x.shape[:2], n, x.shape[2] // n, x.shape[3]), 2, 0) for x in arrays]
    packed = jnp.concatenate([x.reshape(n, -1) for x in parts], 1)
    arrived = lax.all_to_all(packed, axis_name, 0, 0, tiled=True)
    ends = list(itertools.accumulate(x.size // n for x in parts))
    return [x.reshape(y.shape) for x, y in zip(jnp.split(arrived, ends[:-1], 1), parts, strict=True)]


def _join(x: Array) -> Array:
    """Join the shards of tokens `[R, B, T, ...]` to `[B, R * T, ...]`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
