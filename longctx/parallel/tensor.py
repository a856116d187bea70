"""Tensor parallelism outside attention: reductions over devices, the embedding and the head of a sharded vocabulary.

All functions run inside `longctx.parallel.mesh.shard_map`. Source: Megatron-LM (Shoeybi et al. 2019), section 3.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from longctx.parallel.mesh import index_of, present


def psum(x: Shaped[Array, "*shape"], *axes: str) -> Shaped[Array, "*shape"]:
    """The sum over those of the axes that are present, by one all-reduce."""
    axes = present(*axes)
    return lax.psum(x, axes) if axes else x


def pmax(x: Shaped[Array, "*shape"], *axes: str) -> Shaped[Array, "*shape"]:
    """The maximum over those of the axes that are present, by one all-reduce."""
    axes = present(*axes)
    return lax.pmax(x, axes) if axes else x


def embed_tokens(
    table: Shaped[Array, "V_local D"], tokens: Int[Array, "T"], axis_name: str = "tensor"
) -> Shaped[Array, "T D"]:
    """Rows of a table `[V / n, D]` that is sharded by vocabulary, for tokens `[T]`, by one all-reduce."""
    if not present(axis_name):
        return table[tokens]
    row = tokens - index_of(axis_name) * table.shape[0]
    is_local = (row >= 0) & (row < table.shape[0])
    rows = table[jnp.where(is_local, row, 0)]
    return psum(jnp.where(is_local[:, None], rows, jnp.zeros_like(rows)), axis_name)


def argmax(logits: Float[Array, "R V_local"], *axes: str) -> Int[Array, "R"]:
    """The token of the highest logit of each row, the first of equals; the vocabulary is sharded over `axes`.

    It is -1 for a row whose highest logit is not finite: one is NaN or +inf, or all are -inf. It takes two
    reductions of R numbers for any vocabulary.
    """
    best, token = jnp.max(logits, -1), jnp.argmax(logits, -1).astype(jnp.int32)
    over = present(*axes)
    if over:
        best = jnp.where(jnp.isnan(best), jnp.inf, best)  # a reduction over devices may drop a NaN
        token += index_of(*axes) * logits.shape[1]
        best_of_all = lax.pmax(best, over)
        token = lax.pmin(jnp.where(best == best_of_all, token, jnp.iinfo(jnp.int32).max), over)
        best = best_of_all
    return jnp.where(jnp.isfinite(best), token, -1)


def all_gather_vocabulary(logits: Float[Array, "R V_local"], *axes: str) -> Float[Array, "R V"]:
    """Gather the logits `[R, V / n]` of all devices into `[R, V]`."""
    over = present(*axes)
    return lax.all_gather(logits, over, axis=1, tiled=True, to="invarying") if over else logits
