"""Ring pass-Q: keys and values stay, queries travel round a ring, and partial results return to their rank."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels import merge_states
from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import Arguments, Implementation, Window
from longctx.kernels.attention.rule import BiasFunction
from longctx.parallel.exchange import AttentionSpec, exchange, pack_state, unpack_states
from longctx.parallel.ring import fold_ring, fold_ring_and_return, tokens_by_hop


def ring_pass_q(
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
    decode: bool = False,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Attention of this rank's queries to the keys of all ranks: queries travel round a ring, results return.

    Arguments, results and errors are those of `ring_pass_kv`. It sends queries in place of keys, which is better where
    new tokens are few beside the cached ones. Three differences:

    * **decode**: with `decode=True` every query belongs to a sequence of its own (batched decode): `q_segment_ids [T]`
      are the sequences, -1 in rows that have none, and q has no batch dimensions. Forward, each row then reads only the
      keys of its own sequence, and a row without one reads nothing, so a batch that N does not divide costs no more
      than its B queries on every rank. `plan_decode` says which rank has which sequence in which step.
    * **On the wire**, each rank sends `(N - 1) * T * B * (N_heads * H * e + 8)` bytes: queries in N - 1 permutes, which
      the attention of the previous queries hides, and positions and segments in one all-gather, to which `q_first` and
      `q_last` add 4 bytes each. Then it sends
      `(N - 1) * T * B * N_heads * (H + 1) * 4` bytes of partial (out, lse) in float32, in one all-to-all that nothing
      hides. Backward, queries, lse, row terms and the cotangent of out travel in N - 1 permutes, and dQ follows in
      float32; dK and dV never move.
    * **Memory**: N partial results, `N * T * B * N_heads * (H + 1) * 4` bytes, once as sent and once as received.

    Args:
      q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last, axis_name: as for
        `ring_pass_kv`.
      causal, window, sinks, logits_soft_cap, scale, implementation, out_dtype: as for `longctx.kernels.attention`.
      bias: as for `longctx.kernels.attention`, a function alone; its heads are those of this rank, from 0.
      decode: whether every query belongs to a sequence of its own, see above.

    Returns:
      (out `[*B, T, N, Hv]`, lse `[*B, T, N]` float32) of this rank's queries, as of `ring_pass_kv`.

    Raises:
      ValueError, TypeError: as for `ring_pass_kv`; or `decode`, and q or q_segment_ids don't fit it.

    Source:
      Context parallelism paper, 3.5.3, 3.6, algorithms 3 and 4, equation 4.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.kernels import attention
      >>> from longctx.parallel import make_mesh, ring_pass_q, use_devices
      >>> use_devices(4)
      >>> mesh = make_mesh(context=4)
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 32, 2, 16))  # 32 tokens, 8 a device, most of them cached
      >>> q = jax.random.normal(jax.random.key(1), (4, 2, 16))  # the last 4 tokens, one a device
      >>> def local(q, k, v, q_positions, kv_positions):  # on each device
      ...     return ring_pass_q(q, k, v, q_positions, kv_positions)
      >>> run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("context"), out_specs=P("context")))
      >>> out, lse = run(q, k, v, jnp.arange(28, 32), jnp.arange(32))
      >>> dense, _ = attention(q, k, v, q_positions=jnp.arange(28, 32), kv_positions=jnp.arange(32))
      >>> bool(jnp.allclose(out, dense, atol=1e-5))
      True
    """
    if decode and (np.ndim(q) != 3 or q_segment_ids is None):
        raise ValueError(
            "decode takes q [T, N, H] without batch dimensions and q_segment_ids [T], a sequence each, got "
            f"q {np.shape(q)} and q_segment_ids {None if q_segment_ids is None else np.shape(q_segment_ids)}"
        )
    arrays = Arguments(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last)
    spec = AttentionSpec(axis_name, causal, scale, implementation, out_dtype, window, logits_soft_cap, bias)

    def algorithm(kernel: Kernel) -> PassQ:
        return PassQ(axis_name, kernel.beside_hops(lax.axis_size(axis_name)), decode)

    return exchange(algorithm, arrays, spec, sinks)


@final
@dataclasses.dataclass(frozen=True)
class PassQ:
    """The `Algorithm` of `ring_pass_q`; with `decode`, each query is a sequence of its own."""

    axis_name: str
    kernel: Kernel
    decode: bool

    def forward(self, operands: Operands) -> tuple[Array, Array]:
        q, k, v, queries, keys, bias = operands
        block_forward = _decode_forward if self.decode else Kernel.forward

        def attend_local(q: Array, queries: Tokens) -> tuple[Array, Array]:
            return block_forward(self.kernel, Operands(q, k, v, queries, keys, bias))

        queries_of = tokens_by_hop(queries, self.axis_name)
        return pass_q_forward(q, queries_of, attend_local, axis_name=self.axis_name)

    def backward(self, operands: Operands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, Array, Array]:
        q, k, v, queries, keys, bias = operands

        def step(d_kv: Any, block: tuple[Array, ...], queries: Tokens) -> Any:
            q, *of_results = block
            d_q, *parts = self.kernel.backward(Operands(q, k, v, queries, keys, bias), *of_results)
            return (parts if d_kv is None else [x + y for x, y in zip(d_kv, parts, strict=True)]), (d_q,)

        block = (q, lse, row_terms, d_out)
        (d_k, d_v), (d_q,) = fold_ring_and_return(block, queries, step, self.axis_name)
        return d_q, d_k, d_v


def pass_q_forward(
    q: Array,
    queries_of: Callable[[int], Any],
    attend_local: Callable[[Array, Any], tuple[Array, Array]],
    *,
    axis_name: str,
) -> tuple[Array, Array]:
    """Compute the state of this rank's queries `[B, T, N, H]` over the keys of all ranks.

    `queries_of` gives the metadata of the queries that are here after a hop, and `attend_local(q, metadata)` the state
    of some rank's queries over this rank's keys.
    """
    num_ranks, shape = lax.axis_size(axis_name), q.shape

    def step(partials: Array | None, block: tuple[Array, ...], queries: Any, source: Array) -> Array:
        nonlocal shape
        out, lse = attend_local(block[0], queries)
        part, shape = pack_state(out, lse, 1), out.shape
        if partials is None:
            partials = jnp.zeros_like(part, shape=(num_ranks, part.size))
        return lax.dynamic_update_slice(partials, part, (source, jnp.zeros_like(source)))

    partials = fold_ring((q,), queries_of, step, axis_name, may_loop=True)
    partials = lax.all_to_all(partials, axis_name, 0, 0, tiled=True)
    return merge_states(*unpack_states(partials, shape))


def _decode_forward(kernel: Kernel, operands: Operands) -> tuple[Array, Array]:
    """Attend as a batch of sequences of one query each, over keys that they share."""
    q, queries = jax.tree.map(lambda x: x[0, :, None], (operands.q, operands.queries))
    rows = operands._replace(q=q, queries=queries)
    out, lse = kernel.forward(rows)
    return out[None, :, 0], lse[None, :, 0]
