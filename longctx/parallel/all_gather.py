"""All-gather pass-KV: everybody fetches all keys and values, then attends."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels import merge_state
from longctx.kernels.attention.kernel import Operands, attend
from longctx.parallel.exchange import Exchange, enter, leave


def all_gather_kv(
    q: Array,
    k: Array,
    v: Array,
    q_positions: Array | None = None,
    kv_positions: Array | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    *,
    axis_name: str = "context",
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Array, Array]:
    """Attention of this rank's queries to the keys of all ranks, after one all-gather of keys and values.

    Arguments, results and errors are those of `ring_pass_kv`. It sends the same
    `(N - 1) * S * B * (2 * K * H * e + 8)` bytes, at once and before any attention, so nothing hides them: best where
    sequences are short and the latency of N - 1 hops is what counts. Memory: the keys and values of all ranks, and
    backward their dK and dV in float32. Backward keys and values are gathered again rather than kept, and dK and dV go
    home in one reduce-scatter. The
    shards are attended to one after another, as each is sorted by (segment, position) and all together are not.

    Source: Llama 3 training (Llama Team 2024, 3.3.2), as described in the context parallelism paper, 3.5.2.
    """
    kernel, operands, out_dtype = enter(
        *(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids),
        *(axis_name, causal, scale, implementation, out_dtype),
    )
    return leave(attend(AllGatherKV(axis_name, kernel), operands), q, out_dtype)


class AllGatherKV(Exchange):
    def forward(self, operands: Operands) -> tuple[Array, Array]:
        q, k, v, queries, keys = operands

        def step(state: Any, shard: Any) -> Any:
            k, v, keys = shard
            out, lse = self.kernel.forward(Operands(q, k, v, queries, keys))
            return merge_state(state[0], state[1], out, lse), None

        zeros = jnp.zeros_like(q, jnp.promote_types(q.dtype, jnp.float32))
        state = (zeros, jnp.full_like(zeros[..., 0], -jnp.inf))
        return lax.scan(step, state, lax.all_gather((k, v, keys), self.axis_name))[0]

    def backward(self, operands: Operands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, Array, Array]:
        q, k, v, queries, keys = operands

        def step(d_q: Array, shard: Any) -> Any:
            k, v, keys = shard
            part, *d_kv = self.kernel.backward(Operands(q, k, v, queries, keys), lse, row_terms, d_out)
            return d_q + part, d_kv

        shards = lax.all_gather((k, v, keys), self.axis_name)
        d_q, d_kv = lax.scan(step, jnp.zeros_like(d_out), shards)
        d_k, d_v = lax.psum_scatter(d_kv, self.axis_name)
        return d_q, d_k, d_v
