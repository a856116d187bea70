"""The oracle: dense attention, every score in memory. Short rather than fast; float64 when x64 is on."""

import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax

from longctx.kernels.attention.mask import Tokens, visible


def reference_attention(
    q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, causal: bool, scale: float
) -> tuple[Array, Array]:
    """q `[B, T, N, H]`, k and v `[B, S, K, H]` -> (out `[B, T, N, H]`, lse `[B, T, N]`), both float32 or wider."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    q = rearrange(q, "b t (k g) h -> b t k g h", k=k.shape[2])
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest")
    seen = visible(queries, keys, causal)[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)

    peak = lax.stop_gradient(jnp.max(scores, -1, keepdims=True, initial=-jnp.inf))
    empty = peak == -jnp.inf
    weights = jnp.exp(scores - jnp.where(empty, 0, peak))
    total = jnp.where(empty, 1, jnp.sum(weights, -1, keepdims=True))
    out = jnp.einsum("bkgts,bskh->btkgh", weights / total, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
    return rearrange(out, "b t k g h -> b t (k g) h"), rearrange(lse[..., 0], "b k g t -> b t (k g)")
