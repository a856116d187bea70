"""Tensor parallelism of what is not attention: sums over devices, the vocabulary's embedding and head.

Inside `longctx.parallel.mesh.shard_map`. Source: Megatron-LM (Shoeybi et al. 2019), section 3.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from longctx.parallel.mesh import index_of, present


def psum(x: Shaped[Array, "*shape"], *axes: str) -> Shaped[Array, "*shape"]:
    """The sum over some axes, by one all-reduce."""
    axes = present(*axes)
    return lax.psum(x, axes) if axes else x


def embed_tokens(
    table: Shaped[Array, "V_local D"], tokens: Int[Array, "T"], axis_name: str = "tensor"
) -> Shaped[Array, "T D"]:
    """Rows of a table `[V / n, D]` that is sharded by vocabulary: tokens `[T]` -> `[T, D]`, by one all-reduce."""
    if not present(axis_name):
        return table[tokens]
    own = tokens - index_of(axis_name) * table.shape[0]
    here = (own >= 0) & (own < table.shape[0])
    rows = table[jnp.where(here, own, 0)]
    return psum(jnp.where(here[:, None], rows, jnp.zeros_like(rows)), axis_name)


def argmax(logits: Float[Array, "R V_local"], *axes: str) -> Int[Array, "R"]:
    """Logits `[R, V / n]`, sharded by vocabulary over `axes` -> the tokens `[R]` with the highest, the first of equals.

    Two reductions of R numbers, whatever the vocabulary.
    """
    best, token = jnp.max(logits, -1), jnp.argmax(logits, -1).astype(jnp.int32)
    over = present(*axes)
    if not over:
        return token
    token += index_of(*axes) * logits.shape[1]
    return lax.pmin(jnp.where(best == lax.pmax(best, over), token, jnp.iinfo(jnp.int32).max), over)


def all_gather_vocabulary(logits: Float[Array, "R V_local"], *axes: str) -> Float[Array, "R V"]:
    """Logits `[R, V / n]` of all devices -> `[R, V]`."""
    over = present(*axes)
    return lax.all_gather(logits, over, axis=1, tiled=True, to="invarying") if over else logits
