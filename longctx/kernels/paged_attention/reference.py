"""Dense paged attention, the oracle of all tests: it gathers all pages and holds every score; float64 under x64."""

import jax.numpy as jnp
from einops import rearrange
from jax import Array

from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.bits import from_bits
from longctx.kernels.fp8_rows import dequantize_rows
from longctx.kernels.operand_dtype import wide_dtype
from longctx.kernels.paged_attention.operands import PagedOperands


def reference_paged_attention(operands: PagedOperands, rule: AttentionRule, plan: None = None) -> tuple[Array, Array]:
    """(out `[T, N, H]`, lse `[T, N]`), float32 or wider, from scores of every row with every sequence."""
    q, k_pages, v_pages, table, index, kv_lengths, q_positions, q_sequence, first_page, k_scale, v_scale = operands
    page_size, kv_heads, dtype = k_pages.shape[1], k_pages.shape[2], wide_dtype(q.dtype)
    if index is None:
        index = jnp.broadcast_to(jnp.arange(table.shape[1], dtype=jnp.int32), table.shape)
    index = jnp.minimum(index, (2**31 - 1) // page_size - 1)  # the index of an unused entry must not overflow

    positions = rearrange(index, "b m -> b m 1") * page_size + rearrange(jnp.arange(page_size), "p -> 1 1 p")
    written = positions < kv_lengths[:, None, None]
    sequences = jnp.arange(table.shape[0], dtype=jnp.int32)
    own = rearrange(q_sequence, "t -> t 1 1 1") == rearrange(sequences, "b -> 1 b 1 1")
    distance = rearrange(q_positions, "t -> t 1 1 1") - jnp.where(written, positions, 0)[None]
    seen = own & written[None] & (distance >= 0)
    if rule.window[0] is not None:
        seen &= distance <= rule.window[0]

    def keys(pages: Array, page_scale: Array | None) -> Array:
        """`[B, M, page_size, K, H]`. Slots never written may hold NaN, which a weight of 0 would not remove."""
        gathered = pages[first_page + table]
        if page_scale is None:
            rows = from_bits(gathered, q.dtype)
        else:
            rows = dequantize_rows(gathered, rearrange(page_scale[first_page + table], "b m k p -> b m p k"), q.dtype)
        return jnp.where(written[..., None, None], rows.astype(dtype), 0)

    # The scale is not applied to scores: XLA may round a product differently in each place that it computes it in.
    rows = rule.scale * rearrange(q.astype(dtype), "t (k g) h -> t k g h", k=kv_heads)
    scores = jnp.einsum("tkgh,bmpkh->tkgbmp", rows, keys(k_pages, k_scale), precision="highest")
    scores = jnp.where(seen[:, None, None], rule.cap(scores), -jnp.inf)
    peak = jnp.max(scores, (3, 4, 5), keepdims=True)
    empty = peak == -jnp.inf
    weights = jnp.exp(scores - jnp.where(empty, 0, peak))
    total = jnp.where(empty, 1, jnp.sum(weights, (3, 4, 5), keepdims=True))
    out = jnp.einsum("tkgbmp,bmpkh->tkgh", weights / total, keys(v_pages, v_scale), precision="highest")
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
    return out.reshape(q.shape), lse.reshape(q.shape[:2])
