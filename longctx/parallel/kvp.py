"""KV parallelism: all ranks of a group hold the same queries, attend to their own keys, and merge their states."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels import merge_states
from longctx.kernels.arrays import check_ids
from longctx.kernels.attention.kernel import Kernel, Operands, attention_with_vjp
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import Arguments, Implementation, Window
from longctx.kernels.attention.rule import BiasFunction
from longctx.kernels.operand_dtype import wide_dtype
from longctx.kernels.partitioning import match_varying
from longctx.parallel.exchange import AttentionSpec, finish, is_varying, pack_state, unpack_states

# combine(rows, terms, members) -> (rows, terms): the pairs of all ranks, of which each row takes its members.
_Combiner = Callable[[Array, Array, Array | None], tuple[Array, Array]]

# The latency of one more collective, about 10 us, in bytes at some 50 GB/s.
_BYTES_OF_A_COLLECTIVE = 1 << 19


def kvp_attention(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    q_positions: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_positions: Int[ArrayLike, "... S"] | Nested | None = None,
    q_segment_ids: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_segment_ids: Int[ArrayLike, "... S"] | Nested | None = None,
    *,
    q_first: Int[ArrayLike, "... T"] | Nested | None = None,
    q_last: Int[ArrayLike, "... T"] | Nested | None = None,
    group_ids: Int[Array, "T"] | Int[Array, "ranks T"] | None = None,
    merge: Literal["auto", "gather", "all_to_all"] = "auto",
    axis_name: str = "context",
    causal: bool = True,
    window: Window | None = None,
    sinks: Float[ArrayLike, "N"] | None = None,
    logits_soft_cap: Real | None = None,
    bias: BiasFunction | None = None,
    scale: Real | None = None,
    implementation: Implementation | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Attention of queries that all ranks hold to the keys of all ranks. Only states move, for any KV length.

    Args:
      q, q_positions, q_segment_ids, q_first, q_last: the same on all ranks; else as for `ring_pass_kv`.
      k, v, kv_positions, kv_segment_ids, axis_name: as for `ring_pass_kv`.
      group_ids: integers `[T]`, different on each rank: row t is merged over the ranks that give it the same group id,
        and these hold the same query in row t. So one batch can hold rows of a long request on some ranks and rows of
        other requests in the same places on other ranks. Or `[N, T]`, the ids of all ranks, which saves gathering them
        in every layer. None: all ranks are one group.
      merge: how states are merged. `"gather"`: one all-gather of all states, `(N - 1) * A` bytes sent per rank, where
        `A = 4 * B * T * N_heads * (H + 1)`: the fewest collectives, for few rows. `"all_to_all"`: each rank merges a
        part of the rows and sends them back, `(N - 1) / N * (A + B * T * N_heads * (H * e + 4))` bytes for e bytes an
        element of out (4 with sinks), in two steps: for the rows of a chunk. (lse is sent back separately, and not at
        all if it isn't used; rows are padded to a multiple of N.) `"auto"`: `"gather"`, until `"all_to_all"` saves half
        a MiB, the worth of a second collective.
      causal, window, sinks, logits_soft_cap, scale, implementation, out_dtype: as for `longctx.kernels.attention`.
      bias: as for `longctx.kernels.attention`, a function alone; its heads are those of this rank, from 0.

    Returns:
      (out `[*B, T, N, Hv]`, lse `[*B, T, N]` float32), the same on all ranks of a group. With one group, their types
      say that they are replicated over the axis. Backward sums the cotangents of a group the same way, each rank
      computes its share of dQ (which `shard_map` sums, in q's dtype, if q was replicated), and dK and dV never move.

    Raises:
      ValueError, TypeError: as for `ring_pass_kv`; or `merge` or `group_ids` are wrong, or q varies over the ranks of
        one group.

    Source:
      KV parallelism, Mnemosyne 4.4; merging, context parallelism paper, appendix B.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.kernels import attention
      >>> from longctx.parallel import kvp_attention, make_mesh, use_devices
      >>> use_devices(4)
      >>> mesh = make_mesh(context=4)
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 32, 2, 16))  # 32 cached tokens, 8 a device
      >>> q = jax.random.normal(jax.random.key(1), (1, 2, 16))  # the token that is decoded, on all devices
      >>> position = jnp.array([31])
      >>> def local(q, k, v, kv_positions):  # on each device
      ...     return kvp_attention(q, k, v, position, kv_positions)
      >>> specs = (P(), P("context"), P("context"), P("context"))
      >>> out, lse = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))(q, k, v, jnp.arange(32))
      >>> dense, _ = attention(q, k, v, q_positions=position, kv_positions=jnp.arange(32))
      >>> bool(jnp.allclose(out, dense, atol=1e-5))
      True
    """
    arrays = Arguments(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last)
    spec = AttentionSpec(axis_name, causal, scale, implementation, out_dtype, window, logits_soft_cap, bias)
    kernel, operands, out_dtype = spec.check(arrays)
    num_ranks = lax.axis_size(axis_name)
    if merge not in ("auto", "gather", "all_to_all"):
        raise ValueError(f"merge must be 'auto', 'gather' or 'all_to_all', got {merge!r}")
    # What sinks are added to is rounded after them.
    merged_dtype = out_dtype if sinks is None else wide_dtype(q.dtype)
    all_to_all = _prefers_all_to_all(q, num_ranks, merged_dtype) if merge == "auto" else merge == "all_to_all"
    if group_ids is None and num_ranks > 1 and is_varying(q, axis_name):
        raise ValueError(
            f"q must be replicated over {axis_name!r}, but its type says that it varies: give group_ids, or gather it "
            'with jax.lax.all_gather(..., to="invarying")'
        )
    groups = None if group_ids is None else _check_groups(group_ids, axis_name, num_ranks, q.shape[-3])
    grouped = match_varying(_GroupedOperands(*operands, groups), axis_name)
    state = attention_with_vjp(KVP(axis_name, kernel, all_to_all, merged_dtype), grouped)
    return finish(state, q, out_dtype, sinks)


def merge_over_ranks(
    out: Float[Array, "T N H"],
    lse: Float[Array, "T N"],
    group_ids: Int[Array, "ranks T"],
    axis_name: str = "context",
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Merge the states that ranks hold for the same queries, as `kvp_attention` does with `merge="auto"`.

    Args:
      out: `[T, N, H]`, float32.
      lse: `[T, N]`, float32.
      group_ids: integers `[N_ranks, T]`: row t is merged over the ranks with the same id, which hold the same query.
      axis_name: the mesh axis of the ranks.
      out_dtype: dtype of the merged `out`. None: that of `out`.

    Returns:
      (out `[T, N, H]` in out_dtype, lse `[T, N]` float32) over the keys of a row's group, the same on all its ranks.

    Source:
      Mnemosyne, 4.4; context parallelism paper, appendix B.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from longctx.kernels import attention
      >>> from longctx.parallel import make_mesh, merge_over_ranks, use_devices
      >>> use_devices(4)
      >>> mesh = make_mesh(context=4)
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 32, 2, 16))  # 32 cached tokens, 8 a device
      >>> q = jax.random.normal(jax.random.key(1), (1, 2, 16))
      >>> def local(q, k, v):  # on each device
      ...     state = attention(q, k, v, causal=False, out_dtype=jnp.float32)
      ...     return merge_over_ranks(*state, group_ids=jnp.zeros((4, 1), int))  # all ranks are one group
      >>> run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("context"), P("context")), out_specs=P("context"))
      >>> out, lse = jax.jit(run)(q, k, v)  # one row of each rank
      >>> bool(jnp.allclose(out, attention(q, k, v, causal=False)[0], atol=1e-5))
      True
    """
    out, lse, group_ids = match_varying((out, lse, group_ids), axis_name)
    dtype = out.dtype if out_dtype is None else jnp.dtype(out_dtype)
    all_to_all = _prefers_all_to_all(out, lax.axis_size(axis_name), dtype)
    combine_states = _combine_by_all_to_all if all_to_all else _combine_by_gather
    out, lse = combine_states((out[None], lse[None]), group_ids, _merge_members, axis_name=axis_name, dtype=dtype)
    return out[0].astype(dtype), lse[0]


class _GroupedOperands(NamedTuple):
    """`Operands` in which row t on rank r belongs to group `groups[r, t]`; None: all rows belong to one group."""

    q: Array
    k: Array
    v: Array
    queries: Tokens
    keys: Tokens
    bias: Array | None
    groups: Array | None


def _check_groups(group_ids: Array, axis_name: str, num_ranks: int, length: int) -> Array:
    """Check the group ids and gather them from all ranks: `[N, T]`."""
    groups = jnp.asarray(check_ids("group_ids", group_ids))
    if groups.shape not in ((length,), (num_ranks, length)):
        raise ValueError(
            f"group_ids must have the shape {(length,)} or {(num_ranks, length)}, an id a row, got {groups.shape}"
        )
    return lax.all_gather(groups, axis_name) if groups.ndim == 1 else groups


@final
@dataclasses.dataclass(frozen=True)
class KVP:
    """The `Algorithm` of `kvp_attention`: `kernel` computes on each rank, and states are combined over the ranks."""

    axis_name: str
    kernel: Kernel
    all_to_all: bool
    out_dtype: jnp.dtype

    def forward(self, operands: _GroupedOperands) -> tuple[Array, Array]:
        state = self.kernel.forward(Operands(*operands[:6]))
        return self._combine(state, operands.groups, _merge_members, self.out_dtype)

    def backward(self, operands: _GroupedOperands, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array, ...]:
        # A replicated result has one cotangent. Otherwise each rank has its own, and they add up.
        if operands.groups is not None or not is_varying(operands.q, self.axis_name):
            d_out, row_terms = self._combine((d_out, row_terms), operands.groups, _sum_members, lse.dtype)
        return self.kernel.backward(*match_varying((Operands(*operands[:6]), lse, row_terms, d_out)))

    def _combine(
        self, state: tuple[Array, Array], groups: Array | None, combine: _Combiner, dtype: DTypeLike
    ) -> tuple[Array, Array]:
        run = _combine_by_all_to_all if self.all_to_all else _combine_by_gather
        return run(state, groups, combine, axis_name=self.axis_name, dtype=dtype)


def _prefers_all_to_all(q: Array, num_ranks: int, out_dtype: jnp.dtype) -> bool:
    """Whether the all-to-all saves enough bytes to pay for its second collective."""
    state = 4 * (q.size + q.size // q.shape[-1])
    gather, all_to_all = (num_ranks - 1) * state, (num_ranks - 1) / num_ranks * (state + q.size * out_dtype.itemsize)
    return gather - all_to_all > _BYTES_OF_A_COLLECTIVE


def _combine_by_gather(
    state: tuple[Array, Array], groups: Array | None, combine: _Combiner, *, axis_name: str, dtype: DTypeLike
) -> tuple[Array, Array]:
    """Combine the pairs `[B, T, N, H]` and `[B, T, N]` of all ranks over each row's group, after one all-gather."""
    rows, terms = (jnp.moveaxis(x, 1, 0) for x in state)
    # The result of one group is the same everywhere, and its type should say so.
    kind = "invarying" if groups is None else "varying"
    gathered = lax.all_gather(pack_state(rows, terms, 1)[0], axis_name, to=kind)
    mine = None if groups is None else groups == groups[lax.axis_index(axis_name)][None]
    out, lse = (jnp.moveaxis(x, 0, 1) for x in combine(*unpack_states(gathered, rows.shape), mine))
    return out, lse


def _combine_by_all_to_all(
    state: tuple[Array, Array], groups: Array | None, combine: _Combiner, *, axis_name: str, dtype: DTypeLike
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


def _merge_members(outs: Array, lses: Array, members: Array | None) -> tuple[Array, Array]:
    """Merge the states of all ranks `[N, T, B, ...]`, in each row those of its members, bool `[N, T]`."""
    if members is not None:
        lses = jnp.where(members[..., None, None], lses, -jnp.inf)
    return merge_states(outs, lses)


def _sum_members(rows: Array, terms: Array, members: Array | None) -> tuple[Array, Array]:
    """Sum pairs likewise."""
    if members is None:
        return jnp.sum(rows, 0), jnp.sum(terms, 0)
    weights = members.astype(rows.dtype)[..., None, None]
    return jnp.sum(rows * weights[..., None], 0), jnp.sum(terms * weights, 0)
