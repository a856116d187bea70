"""The oracle: every row's sequence gathered whole, every score in memory; float64 when x64 is on."""

import jax.numpy as jnp
from einops import rearrange, repeat
from jax import Array

from longctx.kernels.bits import from_bits
from longctx.kernels.paged_attention.operands import PagedOperands


def reference_paged_attention(operands: PagedOperands, scale: float) -> tuple[Array, Array]:
    """-> (out `[T, N, H]`, lse `[T, N]`), float32 or wider. Memory is T times the longest sequence."""
    q, k_pages, v_pages, table, index, kv_lengths, q_positions, q_sequence, first_page = operands
    num_sequences, num_entries = table.shape
    page_size, kv_heads, dtype = k_pages.shape[1], k_pages.shape[2], jnp.promote_types(q.dtype, jnp.float32)
    if index is None:
        index = jnp.broadcast_to(jnp.arange(num_entries, dtype=jnp.int32), table.shape)

    real = (q_sequence >= 0) & (q_sequence < num_sequences)
    sequence = jnp.where(real, q_sequence, 0)
    positions = rearrange(index, "b m -> b m 1") * page_size + rearrange(jnp.arange(page_size), "p -> 1 1 p")
    written = rearrange(positions < kv_lengths[:, None, None], "b m p -> b (m p)")[sequence]
    seen = written & (rearrange(positions, "b m p -> b (m p)")[sequence] <= q_positions[:, None]) & real[:, None]

    def keys(pages: Array) -> Array:
        """`[T, M * page_size, N, H]`. What was never written may be NaN, which a weight of 0 doesn't undo."""
        gathered = from_bits(pages[first_page + table], q.dtype).astype(dtype)
        keys = rearrange(gathered, "b m p k h -> b (m p) k h")[sequence]
        keys = jnp.where(written[:, :, None, None], keys, 0)
        return repeat(keys, "t s k h -> t s (k g) h", g=q.shape[1] // kv_heads)

    scores = scale * jnp.einsum("tnh,tsnh->tsn", q.astype(dtype), keys(k_pages), precision="highest")
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    peak = jnp.max(scores, 1, keepdims=True)
    empty = peak == -jnp.inf
    weights = jnp.exp(scores - jnp.where(empty, 0, peak))
    total = jnp.where(empty, 1, jnp.sum(weights, 1, keepdims=True))
    out = jnp.einsum("tsn,tsnh->tnh", weights / total, keys(v_pages), precision="highest")
    return out, jnp.where(empty, -jnp.inf, peak + jnp.log(total))[:, 0]
