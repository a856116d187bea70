"""Helix: KV parallelism whose merged results are sharded by heads, for tensor parallelism of all that follows."""

import dataclasses
from typing import final

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels import merge_states
from longctx.kernels.attention.kernel import Kernel, Operands, attention_with_vjp
from longctx.kernels.attention.operands import Arguments, Implementation, Window, check_sinks
from longctx.kernels.attention.rule import BiasFunction
from longctx.kernels.merge import with_sinks
from longctx.kernels.partitioning import match_varying
from longctx.parallel.exchange import AttentionSpec, is_varying, pack_state, part_of_rank, unpack_states


def helix_attention(
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
    causal: bool = True,
    window: Window | None = None,
    sinks: Float[ArrayLike, "N"] | None = None,
    logits_soft_cap: Real | None = None,
    bias: BiasFunction | None = None,
    scale: Real | None = None,
    implementation: Implementation | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*B T heads Hv"], Float[Array, "*B T heads"]]:
    """Attention of queries that all ranks hold to the keys of all ranks. Each of R ranks gets `N / R` heads of results.

    Rank r has heads `r * N / R` to `(r + 1) * N / R`, and multiplies them by its rows of an output projection that is
    sharded over the axis too, as are the weights of the feed-forward; an all-reduce sums the products. So no rank holds
    or reads weights that another one has. `kvp_attention` returns all heads on every rank, for weights that are
    replicated.

    On the wire, each rank sends `(R - 1) / R * 4 * B * T * N * (Hv + 1)` bytes of float32 states by one all-to-all, for
    any KV length. Backward gathers d out, lse and one number a row and head by one all-gather, `(R - 1) / R` of as many
    bytes and 4 more a row and head; each rank computes its share of dQ (which `shard_map` sums, in q's dtype), and dK
    and dV never move.

    Args:
      q, q_positions, q_segment_ids, q_first, q_last: the same on all ranks; else as for `ring_pass_kv`.
      k, v, kv_positions, kv_segment_ids: as for `ring_pass_kv`.
      axis_name: the mesh axis of R ranks, which divides the N query heads.
      causal, window, sinks, logits_soft_cap, scale, implementation, out_dtype: as for `longctx.kernels.attention`;
        sinks are those of all N heads.
      bias: as for `longctx.kernels.attention`, a function alone; its heads are those of q, from 0.

    Returns:
      (out `[*B, T, N / R, Hv]`, lse `[*B, T, N / R]` float32) of this rank's heads over the keys of all ranks: as
      `P(..., axis_name, None)` outside of `shard_map`, the arrays of all heads.

    Raises:
      ValueError, TypeError: as for `ring_pass_kv`; or q varies over the axis, or the ranks don't divide its heads.

    Source:
      Helix Parallelism (Bhatia et al. 2025, arXiv:2507.07120), section 2.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax import lax
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.kernels import attention
      >>> from longctx.parallel import helix_attention, make_mesh, use_devices
      >>> use_devices(4)
      >>> mesh, (a, b, c) = make_mesh(context=4), jax.random.split(jax.random.key(0), 3)
      >>> k, v = jax.random.normal(a, (2, 32, 2, 16))  # 32 cached tokens, 8 a device
      >>> q, wo = jax.random.normal(b, (1, 8, 16)), jax.random.normal(c, (8, 16, 64))  # one new token, 2 heads a device
      >>> def local(q, k, v, positions, wo):  # on each device
      ...     out, _ = helix_attention(q, k, v, jnp.full(1, 31), positions)
      ...     return lax.psum(jnp.tensordot(out, wo, 2), "context")
      >>> sharded = P("context")
      >>> run = jax.shard_map(local, mesh=mesh, in_specs=(P(), *[sharded] * 4), out_specs=P())
      >>> x = jax.jit(run)(q, k, v, jnp.arange(32), wo)
      >>> dense, _ = attention(q, k, v, causal=False)
      >>> bool(jnp.allclose(x, jnp.tensordot(dense, wo, 2), atol=1e-4))
      True
    """
    arrays = Arguments(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last)
    spec = AttentionSpec(axis_name, causal, scale, implementation, out_dtype, window, logits_soft_cap, bias)
    kernel, operands, out_dtype = spec.check(arrays)
    num_ranks, num_heads = lax.axis_size(axis_name), q.shape[-2]
    if num_ranks > 1 and is_varying(q, axis_name):
        raise ValueError(
            f"q must be replicated over {axis_name!r}, but its type says that it varies: gather it with "
            'jax.lax.all_gather(..., to="invarying")'
        )
    if num_heads % num_ranks:
        raise ValueError(f"the {num_ranks} ranks of axis_name {axis_name!r} must divide q's {num_heads} heads")
    state = attention_with_vjp(Helix(axis_name, kernel), operands)
    sinks = check_sinks(sinks, q)
    if sinks is not None:
        state = with_sinks(state, part_of_rank(match_varying(sinks, axis_name), axis_name, 0))
    out, lse = state
    heads = (*q.shape[:-2], num_heads // num_ranks)
    return out.reshape(*heads, out.shape[-1]).astype(out_dtype), lse.reshape(heads)


def merge_to_heads(
    out: Float[Array, "T N H"], lse: Float[Array, "T N"], axis_name: str = "context"
) -> tuple[Float[Array, "T heads H"], Float[Array, "T heads"]]:
    """Merge the states that all ranks hold for the same queries, as `helix_attention` does.

    Args:
      out: `[T, N, H]`, float32.
      lse: `[T, N]`, float32.
      axis_name: the mesh axis of R ranks, which divides the N heads.

    Returns:
      (out `[T, N / R, H]`, lse `[T, N / R]`), float32, of this rank's heads over the keys of all ranks.

    Source:
      Helix Parallelism, section 2.
    """
    n = lax.axis_size(axis_name)
    rows, heads, size = out.shape
    outs = jnp.moveaxis(out.reshape(rows, n, heads // n, size), 1, 0)
    lses = jnp.moveaxis(lse.reshape(rows, n, heads // n), 1, 0)
    arrived = lax.all_to_all(pack_state(outs, lses, n), axis_name, 0, 0, tiled=True)
    return merge_states(*unpack_states(arrived, outs.shape[1:]))


@final
@dataclasses.dataclass(frozen=True)
class Helix:
    """The `Algorithm` of `helix_attention`: `kernel` computes on each rank, and states are merged head by head."""

    axis_name: str
    kernel: Kernel

    def forward(self, operands: Operands) -> tuple[Array, Array]:
        out, lse = self.kernel.forward(operands)
        batch, length = lse.shape[:2]
        out, lse = (x.reshape(batch * length, *x.shape[2:]) for x in (out, lse))
        out, lse = merge_to_heads(out, lse, self.axis_name)
        return out.reshape(batch, length, *out.shape[1:]), lse.reshape(batch, length, *lse.shape[1:])

    def backward(self, operands: Operands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, ...]:
        # Of the heads of all ranks: each knows its own alone.
        packed = jnp.concatenate([lse[..., None], row_terms[..., None], d_out], -1)
        gathered = lax.all_gather(packed, self.axis_name, axis=2, tiled=True)
        return self.kernel.backward(*match_varying((operands, gathered[..., 0], gathered[..., 1], gathered[..., 2:])))
