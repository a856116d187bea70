"""All-gather pass-KV: every rank gathers all keys and values, then attends."""

import dataclasses
from typing import final

from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.operands import Arguments, Implementation, Window
from longctx.kernels.attention.rule import BiasFunction
from longctx.parallel.exchange import AttentionSpec, ByShard, exchange, gather_tokens, stack_keys


def all_gather_kv(
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
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Attention of this rank's queries to the keys of all ranks, after one all-gather of keys and values.

    Arguments, results and errors are those of `ring_pass_kv`, and so is what it computes.

    On the wire, each rank sends the same `(N - 1) * S * B * (2 * K * H * e + 8)` bytes, in two all-gathers: one of keys
    and values, one of positions and segments. They come before all attention and nothing hides them, so this is best
    for short sequences, where the latency of N - 1 hops counts most. Backward gathers again, and returns dK and dV in
    one reduce-scatter.

    Memory: the keys and values of all ranks, and backward their dK and dV in float32. Attention goes through the shards
    one by one, because each is sorted by (segment, position) and their concatenation is not.

    Args:
      q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last, axis_name: as for
        `ring_pass_kv`.
      causal, window, sinks, logits_soft_cap, scale, implementation, out_dtype: as for `longctx.kernels.attention`.
      bias: as for `longctx.kernels.attention`, a function alone; its heads are those of this rank, from 0.

    Returns:
      (out `[*B, T, N, Hv]`, lse `[*B, T, N]` float32) of this rank's queries, as of `ring_pass_kv`.

    Raises:
      ValueError, TypeError: as for `ring_pass_kv`.

    Source:
      Llama 3 training (Llama Team 2024, 3.3.2), as described in the context parallelism paper, 3.5.2.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.kernels import attention
      >>> from longctx.parallel import all_gather_kv, make_mesh, use_devices
      >>> from longctx.parallel import shard_positions, shard_sequence, unshard_sequence
      >>> use_devices(4)
      >>> mesh = make_mesh(context=4)
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 32, 2, 16))  # 32 tokens, 2 heads
      >>> positions, _ = shard_positions(32, 4)  # in the order of the shards
      >>> def local(q, k, v, positions):  # on each device
      ...     return all_gather_kv(q, k, v, positions, positions)
      >>> run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("context"), out_specs=P("context")))
      >>> out, lse = run(*(shard_sequence(x, 4, axis=0) for x in (q, k, v)), positions)
      >>> bool(jnp.allclose(unshard_sequence(out, 4, axis=0), attention(q, k, v)[0], atol=1e-5))
      True
    """
    arrays = Arguments(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last)
    spec = AttentionSpec(axis_name, causal, scale, implementation, out_dtype, window, logits_soft_cap, bias)
    return exchange(lambda kernel: AllGatherKV(axis_name, kernel), arrays, spec, sinks)


@final
@dataclasses.dataclass(frozen=True)
class AllGatherKV:
    """The `Algorithm` of `all_gather_kv`: `kernel` computes on each rank, over all ranks of the mesh axis."""

    axis_name: str
    kernel: Kernel

    def forward(self, operands: Operands) -> tuple[Array, Array]:
        return ByShard(self.kernel).forward(_gather_shards(operands, self.axis_name))

    def backward(self, operands: Operands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, Array, Array]:
        gathered = _gather_shards(operands, self.axis_name)
        d_q, d_kv = ByShard(self.kernel).stacked_backward(gathered, lse, row_terms, d_out)
        d_kv = tuple(lax.psum_scatter(x, self.axis_name) for x in d_kv)
        d_k, d_v = d_kv[0] if len(d_kv) == 1 else d_kv
        return d_q, d_k, d_v


def _gather_shards(operands: Operands, axis_name: str) -> Operands:
    """Gather keys and values `[N, 2, B, S, K, H]` in one message, and their positions and segments in another."""
    kv = tuple(lax.all_gather(x, axis_name) for x in stack_keys(operands.k, operands.v))
    return operands._replace(k=kv[0], v=kv[-1], keys=gather_tokens(operands.keys, axis_name))
