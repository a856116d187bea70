"""Combines what ranks computed for the same rows: states merge, cotangents add up."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels import merge_states
from longctx.parallel.exchange import pack_state, unpack_states

# combine(rows, terms, members) -> (rows, terms): the pairs of all ranks, of which each row takes its members.
Combiner = Callable[[Array, Array, Array | None], tuple[Array, Array]]

# The latency of one more collective, about 10 us, in bytes at some 50 GB/s.
_BYTES_OF_A_COLLECTIVE = 1 << 19


def prefers_all_to_all(q: Array, num_ranks: int, out_dtype: jnp.dtype) -> bool:
    """Whether the all-to-all saves enough bytes to pay for its second collective."""
    state = 4 * (q.size + q.size // q.shape[-1])
    gather, all_to_all = (num_ranks - 1) * state, (num_ranks - 1) / num_ranks * (state + q.size * out_dtype.itemsize)
    return gather - all_to_all > _BYTES_OF_A_COLLECTIVE


def combine_by_gather(
    state: tuple[Array, Array], groups: Array | None, combine: Combiner, *, axis_name: str, dtype: DTypeLike
) -> tuple[Array, Array]:
    """Combine the pairs `[B, T, N, H]` and `[B, T, N]` of all ranks over each row's group, after one all-gather."""
    rows, terms = (jnp.moveaxis(x, 1, 0) for x in state)
    # The result of one group is the same everywhere, and its type should say so.
    kind = "invarying" if groups is None else "varying"
    gathered = lax.all_gather(pack_state(rows, terms, 1)[0], axis_name, to=kind)
    mine = None if groups is None else groups == groups[lax.axis_index(axis_name)][None]
    out, lse = (jnp.moveaxis(x, 0, 1) for x in combine(*unpack_states(gathered, rows.shape), mine))
    return out, lse


def combine_by_all_to_all(
    state: tuple[Array, Array], groups: Array | None, combine: Combiner, *, axis_name: str, dtype: DTypeLike
) -> tuple[Array, Array]:
    """Combine likewise, but rank r combines only the r-th part of the rows, for all ranks, and sends out as `dtype`."""
    rows, terms = (jnp.moveaxis(x, 1, 0) for x in state)
    n, length = lax.axis_size(axis_name), rows.shape[0]
    per_rank = -(-length // n)

    def pad(x: Array, axis: int = 0) -> Array:
        return jnp.pad(x, [(0, (n * per_rank - length) * (i == axis)) for i in range(x.ndim)])

    def exchange(x: Array) -> Array:
        return lax.all_to_all(x, axis_name, 0, 0, tiled=True)

    parts = unpack_states(exchange(pack_state(pad(rows), pad(terms), n)), (per_rank, *rows.shape[1:]))
    if groups is None:
        out, lse = combine(*parts, None)
        combined = lax.all_gather((out.astype(dtype), lse), axis_name, to="invarying")
    else:
        first = lax.axis_index(axis_name) * per_rank
        mine = lax.dynamic_slice_in_dim(pad(groups, 1), first, per_rank, 1)
        out, lse = jax.vmap(lambda group: combine(*parts, mine == group[None]))(mine)
        combined = exchange(out.astype(dtype)), exchange(lse)
    out, lse = (x.reshape(n * per_rank, *x.shape[2:])[:length] for x in combined)
    return jnp.moveaxis(out, 0, 1), jnp.moveaxis(lse, 0, 1)


def merge_members(outs: Array, lses: Array, members: Array | None) -> tuple[Array, Array]:
    """Merge the states of all ranks `[N, T, B, ...]`, in each row those of its members, bool `[N, T]`."""
    if members is not None:
        lses = jnp.where(members[..., None, None], lses, -jnp.inf)
    return merge_states(outs, lses)


def sum_members(rows: Array, terms: Array, members: Array | None) -> tuple[Array, Array]:
    """Sum pairs likewise."""
    if members is None:
        return jnp.sum(rows, 0), jnp.sum(terms, 0)
    weights = members.astype(rows.dtype)[..., None, None]
    return jnp.sum(rows * weights[..., None], 0), jnp.sum(terms * weights, 0)
