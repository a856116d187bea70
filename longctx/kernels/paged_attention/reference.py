"""Dense paged attention, the oracle of all tests: it gathers all pages and holds every score; float64 under x64."""

import jax.numpy as jnp
from einops import rearrange
from jax import Array

from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.operand_dtype import wide_dtype
from longctx.kernels.paged_attention.operands import PagedOperands, gather_slots, slots


def reference_paged_attention(operands: PagedOperands, rule: AttentionRule, plan: None = None) -> tuple[Array, Array]:
    """(out `[T, N, Hv]`, lse `[T, N]`), float32 or wider, from scores of every row with every sequence."""
    q, table, kv_heads, dtype = operands.q, operands.page_table, operands.k_pages.shape[2], wide_dtype(operands.q.dtype)
    positions, written = slots(operands)
    sequences = jnp.arange(table.shape[0], dtype=jnp.int32)
    own = rearrange(operands.q_sequence, "t -> t 1 1 1") == rearrange(sequences, "b -> 1 b 1 1")
    distance = rearrange(operands.q_positions, "t -> t 1 1 1") - positions[None]
    seen = own & written[None] & (distance >= 0)
    first = operands.first_seen(rule.window[0])
    if first is not None:
        seen &= positions[None] >= rearrange(first, "t -> t 1 1 1")
    k, v = (
        gather_slots(operands, pages, scale, written, dtype)
        for pages, scale in ((operands.k_pages, operands.k_scale), (operands.v_pages, operands.v_scale))
    )

    # The scale is not applied to scores: XLA may round a product differently in each place that it computes it in.
    rows = rule.scale * rearrange(q.astype(dtype), "t (k g) h -> t k g h", k=kv_heads)
    scores = jnp.einsum("tkgh,bmpkh->tkgbmp", rows, k, precision="highest")
    scores = jnp.where(seen[:, None, None], rule.cap(scores), -jnp.inf)
    peak = jnp.max(scores, (3, 4, 5), keepdims=True)
    empty = peak == -jnp.inf
    weights = jnp.exp(scores - jnp.where(empty, 0, peak))
    total = jnp.where(empty, 1, jnp.sum(weights, (3, 4, 5), keepdims=True))
    out = jnp.einsum("tkgbmp,bmpkh->tkgh", weights / total, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
    return out.reshape(operands.out_shape), lse.reshape(q.shape[:2])
