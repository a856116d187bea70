"""Dense attention, the oracle of all tests: short rather than fast, with every score in memory; float64 under x64."""

import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax

from longctx.kernels.attention.mask import Tokens, visible
from longctx.kernels.attention.online_softmax import exp_below
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.merge import merge_state
from longctx.kernels.operand_dtype import wide_dtype


def reference_attention(
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    rule: AttentionRule,
    state: tuple[Array, Array] | None = None,
    bias: Array | None = None,
) -> tuple[Array, Array]:
    """Compute (out `[B, T, N, Hv]`, lse `[B, T, N]`), float32 or wider.

    q is `[B, T, N, H]`, k `[B, S, K, H]`, v `[B, S, K, Hv]`, and no length is 0.

    Given the `state` (out, lse) of other keys, the result is over those keys and these.
    """
    scores, _, _, _, v = _scores(q, k, v, queries, keys, rule, bias)
    peak = lax.stop_gradient(jnp.max(scores, -1, keepdims=True, initial=-jnp.inf))
    empty = peak == -jnp.inf
    weights = jnp.exp(scores - jnp.where(empty, 0, peak))
    total = jnp.where(empty, 1, jnp.sum(weights, -1, keepdims=True))
    out = jnp.einsum("bkgts,bskh->btkgh", weights / total, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
    out, lse = rearrange(out, "b t k g h -> b t (k g) h"), rearrange(lse[..., 0], "b k g t -> b t (k g)")
    return (out, lse) if state is None else merge_state(state[0], state[1], out, lse)


def reference_backward(
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    rule: AttentionRule,
    lse: Array,
    row_terms: Array,
    d_out: Array,
    bias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """d_q, d_k and d_v, from lse and row terms over all keys, of which k and v hold some.

    `attention` differentiates the forward pass instead; exchanges call this, with a bias of head numbers at most.
    """
    scores, slope, q, k, v = _scores(q, k, v, queries, keys, rule, bias)
    by_row = (rearrange(x, "b t (k g) -> b k g t 1", k=k.shape[2]) for x in (lse, row_terms))
    lse, row_terms = by_row
    d_out = rearrange(d_out, "b t (k g) h -> b t k g h", k=k.shape[2])
    weights = exp_below(scores, jnp.where(lse == -jnp.inf, jnp.inf, lse))
    d_scores = weights * (jnp.einsum("btkgh,bskh->bkgts", d_out, v, precision="highest") + row_terms)
    d_scores = d_scores * slope
    d_q = rule.scale * jnp.einsum("bkgts,bskh->btkgh", d_scores, k, precision="highest")
    d_k = jnp.einsum("bkgts,btkgh->bskh", d_scores, q, precision="highest")
    d_v = jnp.einsum("bkgts,btkgh->bskh", weights, d_out, precision="highest")
    return rearrange(d_q, "b t k g h -> b t (k g) h"), d_k, d_v


def _scores(
    q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, rule: AttentionRule, bias: Array | None
) -> tuple[Array, Array | float, Array, Array, Array]:
    """Scores `[B, K, G, T, S]`, -inf where masked, and their slope; and scale * q `[B, T, K, G, H]`, k and v, as wide.

    The scale is not applied to scores: XLA may round a product differently in each place that it computes it in.
    """
    dtype = wide_dtype(q.dtype)
    k, v = k if k.ndim == 5 else (k, v)  # both in one array
    q = rule.scale * rearrange(q.astype(dtype), "b t (k g) h -> b t k g h", k=k.shape[2])
    k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])).astype(dtype) for x in (k, v))
    capped = rule.cap(jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest"))
    if bias is not None:  # `[B or 1, N or 1, ...]`
        bias = bias.reshape(len(bias), *((1, 1) if bias.shape[1] == 1 else capped.shape[1:3]), *bias.shape[2:])
    positions = queries.positions[:, None, None, :, None], keys.positions[:, None, None, None, :]
    scores = rule.biased(capped, bias, *positions)
    seen = visible(rule.visible(queries), keys)[:, None, None]
    return jnp.where(seen, scores, -jnp.inf), rule.slope(capped), q, k, v
