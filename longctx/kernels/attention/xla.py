"""Blockwise attention with an online softmax in plain XLA, for any backend. Memory is linear in T + S, both ways.

A tile is a block of queries. All query heads that share a KV head are folded into its rows, so neither K nor V is
repeated. For each tile two loops run over blocks of keys: the first without a mask, over blocks of which every row sees
every key; the second with a mask, over the blocks at the edges. Both ranges follow from the minima and maxima of each
block's positions and segments (`mask.block_range`), so blocks that the mask empties cost nothing. Blocks are sliced in
place: no array is padded, transposed or copied whole.
"""

import jax.numpy as jnp
from jax import Array, lax

from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.online_softmax import OnlineSoftmax, dot, exp_below
from longctx.kernels.attention.rule import AttentionRule, is_added
from longctx.kernels.attention.tiling import Tiling
from longctx.kernels.barrier import hold
from longctx.kernels.merge import merge_state
from longctx.kernels.operand_dtype import operand_dtype, wide_dtype

# With at most this many rows over all heads, one product serves all KV heads of a block.
_FEW_ROWS = 256


def xla_attention(
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

    T, S > 0. k, v and keys may have B = 1 for any batch of q; k and v may be one array `[2, B, S, K, H]`, which holds
    both. Given the `state` (out, lse) of other keys, the result is over those keys and these.
    """
    dtype, operands = wide_dtype(q.dtype), operand_dtype(q.dtype)
    # With few queries the products of single KV heads are too small to be fast, so one product serves all of them.
    kv_heads = k.shape[-2]
    join_heads = kv_heads > 1 and q.shape[1] * q.shape[2] <= _FEW_ROWS
    tiling = Tiling.of(q, k, queries, keys, rule, join_heads)
    grouped = tiling.group_heads(_to_block_diagonal(q, kv_heads) if join_heads else q)

    def compute_tile(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        tile = tiling.tile(index)
        q_rows = tile.rows(grouped).astype(operands)

        def step(block: Array, softmax: OnlineSoftmax, masked: bool) -> OnlineSoftmax:
            k_block, v_block = (tile.block(x, block, i).astype(operands) for i, x in enumerate((k, v)))
            capped = rule.scores(dot(q_rows, k_block.T))
            return softmax.absorb(tile.scores(capped, block, rule, bias, masked), v_block)

        old_out, old_lse = (tile.rows(x) for x in state)
        out_rows, lse_rows = tile.sweep(step, OnlineSoftmax.of_state(old_out, old_lse)).state()
        # The tile before has computed the rows that it shares with the last tile.
        own = tile.own_rows()
        out_rows = jnp.where(own[:, None], out_rows, old_out)
        lse_rows = jnp.where(own, lse_rows, old_lse)
        out, lse = state
        return tile.put_rows(out, out_rows), tile.put_rows(lse, lse_rows)

    if state is None or join_heads:
        # In a ring, XLA would otherwise allocate the zeros of all hops at once; so below.
        shape = (*grouped.shape[:-1], tiling.block_heads * v.shape[-1])
        zeros, (_, k, v) = hold(jnp.zeros_like(grouped, dtype, shape=shape), (q, k, v))
        start = (zeros, jnp.full_like(zeros[..., 0], -jnp.inf))
    else:
        start = tiling.group_heads(state[0]), tiling.group_heads(state[1])
    out, lse = lax.fori_loop(0, tiling.num_tiles, compute_tile, start)
    out = _from_block_diagonal(out, kv_heads) if join_heads else out
    out, lse = out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])
    return merge_state(*state, out, lse) if state is not None and join_heads else (out, lse)


def xla_backward(
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
) -> tuple[Array, ...]:
    """d_q, d_k and d_v in one pass over the tiles and ranges of the forward pass, with five matrix products a block.

    A fourth result is the gradient of a bias of numbers.

    Factors of products have the dtype of `operand_dtype`: where that has 16 bits, d_out, the weights and the gradients
    of scores are rounded to it, and in float16 must be within 65504. Results are summed in float32.
    """
    dtype, operands = lse.dtype, operand_dtype(q.dtype)
    tiling = Tiling.of(q, k, queries, keys, rule)
    # Every weight of an empty row is exp(score - inf) = 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    grouped, d_out, row_terms, lse = map(tiling.group_heads, (q, d_out, row_terms, lse))

    def compute_tile(index: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        tile = tiling.tile(index)
        q_rows, d_out_rows = (tile.rows(x).astype(operands) for x in (grouped, d_out))
        terms = tile.rows(row_terms)
        # Rows that the last tile shares with the tile before get weight 0 here, and add nothing.
        lse_rows = jnp.where(tile.own_rows(), tile.rows(lse), jnp.inf)

        def step(block: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
            d_q_rows, d_k, d_v, *d_bias = carry
            k_block, v_block = (tile.block(x, block, i).astype(operands) for i, x in enumerate((k, v)))
            # The same operations as in the forward pass, so that scores are the same to the bit: exp multiplies what
            # they differ by, which is 1e-7 of them.
            capped = rule.scores(dot(q_rows, k_block.T))
            weights = exp_below(tile.scores(capped, block, rule, bias, masked), lse_rows[:, None])
            d_scores = weights * (dot(d_out_rows, v_block.T) + terms[:, None])
            d_bias = [tile.add_bias(x, block, d_scores) for x in d_bias]
            d_scores = (d_scores * rule.scale * rule.slope(capped)).astype(operands)
            d_k = tile.add_block(d_k, block, dot(d_scores.T, q_rows))
            d_v = tile.add_block(d_v, block, dot(weights.astype(operands).T, d_out_rows))
            return d_q_rows + dot(d_scores, k_block), d_k, d_v, *d_bias

        d_q_rows, *rest = tile.sweep(step, (jnp.zeros_like(q_rows, dtype), *state[1:]))
        return tile.add_rows(state[0], d_q_rows), *rest

    added = (bias,) if is_added(bias) else ()
    zeros = jnp.zeros_like(grouped, dtype), *(jnp.zeros_like(x, dtype, shape=x.shape[-4:]) for x in (k, v, *added))
    zeros, (_, k, v) = hold(zeros, (q, k, v))
    d_q, *rest = lax.fori_loop(0, tiling.num_tiles, compute_tile, zeros)
    return d_q.reshape(q.shape), *rest


def _to_block_diagonal(q: Array, kv_heads: int) -> Array:
    """Queries `[B, T, N, H]` -> `[B, T, N, K * H]`, each at the place of its KV head, with zeros elsewhere."""
    by_head = q.reshape(*q.shape[:2], kv_heads, -1, q.shape[3])
    spread = jnp.einsum("btkgh,kj->btkgjh", by_head, jnp.eye(kv_heads, dtype=q.dtype))
    return spread.reshape(*q.shape[:3], -1)


def _from_block_diagonal(out: Array, kv_heads: int) -> Array:
    """Results of block-diagonal queries `[B, T, 1, N, K * H]` -> `[B, T, K, G, H]`, each from its KV head's place."""
    return jnp.einsum("btkgkh->btkgh", out.reshape(*out.shape[:2], kv_heads, out.shape[3] // kv_heads, kv_heads, -1))
