"""Ring pass-KV: every rank keeps its queries, and keys and values travel round a ring."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import Arguments, Implementation, Window
from longctx.kernels.attention.rule import BiasFunction
from longctx.parallel.exchange import AttentionSpec, ByShard, exchange, stack_keys
from longctx.parallel.ring import check_hops, fold_ring, fold_ring_and_return, tokens_by_hop


def ring_pass_kv(
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
    hops: Sequence[int] | None = None,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Attention of this rank's queries to the keys of all ranks: keys and values travel round a ring.

    Call it inside `jax.shard_map`. A shard's keys are its cached and new ones together, best sorted by (segment,
    position). The layout and the sharding of the cache are free, as positions say what a query sees. Shards are equally
    long on all ranks; pad with segment id -1. Masked blocks cost no work.

    On the wire, each rank sends `(N - 1) * S * B * (2 * K * H * e + 8)` bytes for e bytes an element. Keys and values
    go in N - 1 permutes of one message each, which the attention to the previous block hides. Their positions and
    segments, 8 bytes a key (sent once if all sequences share them), go in one all-gather at the start. Backward sends
    the same again, and `(N - 1) * S * B * 2 * K * H * 4` bytes of dK and dV, which follow in float32; all but their
    last hop is hidden.

    Memory, for any N: two shards of keys and values, and one state. (On CPUs, whose compiler drops the order of the
    hops, N shards.)

    Args:
      q: this rank's queries, floating point `[*B, T, N, H]`.
      k, v: this rank's keys `[*B, S, K, H]` and values `[*B, S, K, Hv]`, N a multiple of K.
      q_positions, kv_positions: absolute positions, integers `[T]` or `[*B, T]`, `[S]` or `[*B, S]`; needed if causal.
      q_segment_ids, kv_segment_ids: integers of the same shapes, both or neither; negative means padding.
      q_first, q_last: as for `longctx.kernels.attention`, of this rank's queries; `kv_positions` are needed with them.
      axis_name: the mesh axis of N ranks that forms the ring.
      causal, window, sinks, logits_soft_cap, scale, implementation, out_dtype: as for `longctx.kernels.attention`.
      bias: as for `longctx.kernels.attention`, a function alone; its heads are those of this rank, from 0.
      hops: the hops after which some rank's keys are seen by this or another rank's queries, as `layout_hops` finds
        them for a window: keys of others don't travel. None: all N.

    Returns:
      (out `[*B, T, N, Hv]`, lse `[*B, T, N]` float32) of this rank's queries. Differentiable in q, k and v; the
      residuals are q, k, v, out and lse.

    Raises:
      ValueError, TypeError: an argument is wrong, or positions are missing; the message names it.

    Source:
      Context parallelism paper, 3.5.2 and algorithm 2; Ring Attention (Liu et al. 2023).

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.kernels import attention
      >>> from longctx.parallel import make_mesh, ring_pass_kv, use_devices
      >>> from longctx.parallel import shard_positions, shard_sequence, unshard_sequence
      >>> use_devices(4)
      >>> mesh = make_mesh(context=4)
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 32, 2, 16))  # 32 tokens, 2 heads
      >>> positions, _ = shard_positions(32, 4)  # in the order of the shards
      >>> def local(q, k, v, positions):  # on each device
      ...     return ring_pass_kv(q, k, v, positions, positions)
      >>> run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("context"), out_specs=P("context")))
      >>> out, lse = run(*(shard_sequence(x, 4, axis=0) for x in (q, k, v)), positions)
      >>> bool(jnp.allclose(unshard_sequence(out, 4, axis=0), attention(q, k, v)[0], atol=1e-5))
      True
    """
    arrays = Arguments(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last)
    spec = AttentionSpec(axis_name, causal, scale, implementation, out_dtype, window, logits_soft_cap, bias)

    def algorithm(kernel: Kernel) -> PassKV:
        num_ranks = lax.axis_size(axis_name)
        return PassKV(axis_name, kernel.beside_hops(num_ranks), check_hops(hops, num_ranks))

    return exchange(algorithm, arrays, spec, sinks)


@final
@dataclasses.dataclass(frozen=True)
class PassKV:
    """The `Algorithm` of `ring_pass_kv`: `kernel` computes on each rank of the mesh axis."""

    axis_name: str
    kernel: Kernel | ByShard
    hops: tuple[int, ...]

    def forward(self, operands: Operands) -> tuple[Array, Array]:
        q, k, v, queries, keys, bias = operands

        def step(state: Any, block: tuple[Array, ...], keys: Tokens, source: Array) -> Any:
            return self.kernel.forward(Operands(q, block[0], block[-1], queries, keys, bias), state)

        keys_of = tokens_by_hop(keys, self.axis_name, self.hops)
        return fold_ring(stack_keys(k, v), keys_of, step, self.axis_name, None, self.hops, True)

    def backward(self, operands: Operands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, Array, Array]:
        q, k, v, queries, keys, bias = operands

        def step(d_q: Array | None, block: tuple[Array, ...], keys: Tokens) -> Any:
            beside = Operands(q, block[0], block[-1], queries, keys, bias)
            part, *d_kv = self.kernel.backward(beside, lse, row_terms, d_out)
            return (part if d_q is None else d_q + part), tuple(d_kv)

        d_q, (d_k, d_v) = fold_ring_and_return(stack_keys(k, v), keys, step, self.axis_name, self.hops)
        return d_q, d_k, d_v
