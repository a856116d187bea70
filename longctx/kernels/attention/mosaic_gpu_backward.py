"""Gradients of attention on Hopper GPUs: prepares tiles for the kernel, once for queries and once for keys."""

import math

import jax.numpy as jnp
from jax import Array

from longctx.kernels.attention.mask import Tokens, Visible
from longctx.kernels.attention.mosaic_gpu import make_tiles
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.mosaic_gpu.backward import BackwardConfig, attention_backward
from longctx.kernels.mosaic_gpu.keys import Contiguous
from longctx.kernels.mosaic_gpu.tile_config import Registers, TileConfig

# A multiple of every block_q and block_kv.
_WHOLE = 128


def mosaic_gpu_backward(
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    rule: AttentionRule,
    lse: Array,
    row_terms: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """As `xla_backward`, for 16-bit q, k and v with a head size of 64, 128 or 256.

    Results are float32 and are summed in float32. Factors of products have 16 bits: d_out, the weights and the
    gradients of scores are rounded to the dtype of q, and in float16 must be within 65504.
    """
    batch, head_size = q.shape[0], q.shape[-1]
    d_out = d_out.astype(q.dtype)
    # lse is divided by the scale, which must therefore be positive: q takes its sign.
    scale = 0.0 if abs(rule.scale) < 1e-30 else rule.scale
    sign, scale = (scale > 0) - (scale < 0), abs(scale) or 1.0
    q = q if sign == 1 else q * jnp.asarray(sign, q.dtype)
    stats = _stats(lse / scale, row_terms)

    def run(from_keys: bool, scores: bool, weights: bool) -> list[Array]:
        config = BackwardConfig(from_keys, scores, weights, scale, _tile_config(head_size, from_keys))
        rows, others = (q, d_out), (k, v)
        sides: tuple[Visible | Tokens, Visible | Tokens] = rule.visible(queries), keys
        if from_keys:
            rows, others = others, rows
            if queries.first is None and queries.last is None:
                # A query sees keys that are not after it. With positions in reverse order, a key sees queries that are
                # not before it, and as far away as they see it. (~x is -x - 1, and has no overflow.) So the kernel
                # reads one position of each query.
                reversed_keys = Tokens(~keys.positions, keys.segments)
                sides = rule.visible(reversed_keys), Tokens(~queries.positions, queries.segments)
            else:
                sides = keys, sides[0]
        length = rows[0].shape[-3]
        shared_rows, shared_keys = (x[0].shape[-4] < batch for x in (rows, others))
        tiles, seen, tokens = make_tiles(batch, *sides, config.tile_config, shared_rows, shared_keys)
        results = attention_backward(config, rows, Contiguous(*others, tokens), seen, stats, tiles)
        return [x.reshape(batch, -1, *x.shape[2:])[:, :length] for x in results]

    (d_q,) = run(from_keys=False, scores=True, weights=False)
    d_q = d_q if sign == 1 else d_q * sign
    if head_size <= 128:
        d_k, d_v = run(from_keys=True, scores=True, weights=True)
    else:  # a multiprocessor has too few registers for both sums at once
        (d_k,) = run(from_keys=True, scores=True, weights=False)
        (d_v,) = run(from_keys=True, scores=False, weights=True)
    if k.shape[-4] < batch:
        d_k, d_v = (jnp.sum(x, 0, keepdims=True) for x in (d_k, d_v))
    return d_q, d_k, d_v


def _tile_config(head_size: int, from_keys: bool) -> TileConfig:
    """The largest sizes that registers and shared memory hold."""
    if head_size == 256:
        return TileConfig(block_q=64, block_kv=64, num_stages=2)
    block_kv, num_stages = {64: (128, 4), 128: (64, 3) if from_keys else (128, 2)}[head_size]
    return TileConfig(128, block_kv, num_stages, Registers(producer=24, consumer=240))


def _stats(lse: Array, row_terms: Array) -> Array:
    """-lse and row terms, `[2, B, N, T in whole blocks]`.

    Empty rows and rows beyond the end get -inf, so that their weights are exp(-inf) = 0.
    """
    padding = ((0, 0), (0, 0), (0, -lse.shape[1] % _WHOLE))
    starts = jnp.where(lse == -jnp.inf, -jnp.inf, -lse)
    starts, row_terms = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in (starts, row_terms))
    return jnp.stack([jnp.pad(starts, padding, constant_values=-math.inf), jnp.pad(row_terms, padding)])
