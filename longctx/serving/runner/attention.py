"""Attention of a step's rows to pages that are sharded over context ranks, inside `jax.shard_map`."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, Shaped

from longctx.kernels import attention, merge_state, paged_attention, plan_paged_attention, write_pages
from longctx.kernels.attention.kernel import Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import check_kernel, match_varying
from longctx.kernels.bits import from_bits
from longctx.kernels.paged_attention import PagedPlan
from longctx.parallel.exchange import gather_tokens
from longctx.parallel.kvp import merge_over_ranks
from longctx.parallel.pass_kv import pass_kv_forward
from longctx.parallel.pass_q import pass_q_forward
from longctx.parallel.ring import ring_source
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.step_inputs import RowInputs, Shape

State = tuple[Array, Array]
"""A partial attention result, `(out, lse)`."""

RowMetadata = tuple[Array, Array, Array]
"""Arguments of `paged_attention` after its page tables: key lengths, and the rows' positions and slots."""


class PageTables(NamedTuple):
    """This rank's page tables.

    Attributes:
      table: `[slots, entries]` int32, this rank's pages of each slot.
      page_index: `[slots, entries]` int32, which page of its sequence each entry is; None: entry m is page m. Unused
        entries have an index beyond any length.
    """

    table: Int[Array, "slots entries"]
    page_index: Int[Array, "slots entries"] | None

    @property
    def numbered(self) -> Int[Array, "slots entries"]:
        """`page_index`, also where entry m is page m."""
        if self.page_index is not None:
            return self.page_index
        return jnp.broadcast_to(jnp.arange(self.table.shape[1], dtype=jnp.int32)[None], self.table.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """The `attend` callable of a step, which carries a `PagedCache` through the model's layers.

    In every layer the rows first write their keys and values into their pages. Then every row attends to the keys of
    its sequence up to its own position. Local rows attend to the pages of their rank. Replicated rows do so on each
    rank, and their states are merged. Sharded rows attend to each other, and to the keys cached before this step by
    a ring over all ranks. Only the new keys and values of sharded rows are gathered.

    It is a pytree, so that one program can make it and the programs of the layers can use it.
    """

    tables: PageTables
    pages: Int[Array, "written"]
    offsets: Int[Array, "written"]
    sharded: "_ShardedRows | None"
    unsharded: "_UnshardedRows | None"
    shape: Shape = dataclasses.field(metadata={"static": True})

    @classmethod
    def make(
        cls,
        inputs: RowInputs,
        tables: PageTables,
        shape: Shape,
        num_heads: int,
        pool: Shaped[Array, "pages page_size K H"],
    ) -> Self:
        """Derive what all layers of a step share.

        Args:
          inputs: this rank's rows.
          shape: static sizes of the step.
          num_heads: query heads on this device.
          pool: the key pages; only its shape and dtype are used.
        """
        has_unsharded = shape.replicated or shape.local
        return cls(
            tables,
            inputs.pages,
            inputs.offsets,
            _ShardedRows.make(inputs, tables, shape, num_heads, pool) if shape.sharded else None,
            _UnshardedRows.make(inputs, tables, shape, num_heads, pool) if has_unsharded else None,
            shape,
        )

    def __call__(self, cache: PagedCache, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, PagedCache]:
        shape = self.shape
        first_page = layer * shape.num_pages
        gathered = None
        written = jnp.stack(_finite_values(k, v), 1)
        if self.sharded is not None:
            new, others = jnp.split(written, [shape.sharded])
            gathered = lax.all_gather(new, "context", tiled=True)
            written = jnp.concatenate([gathered, others])
        pages = jnp.where(self.pages >= 0, self.pages + first_page, -1)
        cache = PagedCache(*write_pages(cache.k, cache.v, written[:, 0], written[:, 1], pages, self.offsets))
        outs = []
        if self.sharded is not None and gathered is not None:
            outs.append(self.sharded(cache, self.tables, first_page, q[: shape.sharded], gathered))
        if self.unsharded is not None:
            outs.append(self.unsharded(cache, self.tables, first_page, q[shape.sharded :]))
        return (outs[0] if len(outs) == 1 else jnp.concatenate(outs)), cache


def _finite_values(k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values `[T, K, H]` with finite values: a key is NaN where it or its value was not finite.

    A mask on the scores gives the keys of other sequences the weight 0, but 0 times a value of NaN is NaN. Queries that
    see the key get NaN, as they would have.
    """
    is_finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), -1, keepdims=True)
    return jnp.where(is_finite, k, jnp.nan), jnp.where(is_finite, v, jnp.zeros_like(v))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _UnshardedRows:
    """Attention of replicated and local rows, which need the pages of their own rank only."""

    groups: Array | None
    metadata: RowMetadata
    plan: PagedPlan
    shape: Shape = dataclasses.field(metadata={"static": True})

    @classmethod
    def make(cls, inputs: RowInputs, tables: PageTables, shape: Shape, num_heads: int, pool: Array) -> Self:
        slots, positions = inputs.slots[shape.sharded :], inputs.positions[shape.sharded :]
        empty = jnp.zeros_like(tables.table[:, 0])
        lengths = empty.at[jnp.maximum(slots, 0)].max(jnp.where(slots >= 0, positions + 1, 0))
        metadata = (lengths, positions, slots)
        plan = plan_paged_attention(num_heads, pool, *tables, *metadata)
        return cls(inputs.groups.reshape(shape.ranks, -1) if shape.replicated else None, metadata, plan, shape)

    def __call__(self, cache: PagedCache, tables: PageTables, first_page: Array, q: Array) -> Array:
        replicated = self.shape.replicated
        # Partial states stay float32 until they are merged.
        dtype = jnp.float32 if replicated else None
        arguments = (*tables, *self.metadata, first_page)
        out, lse = paged_attention(q, cache.k, cache.v, *arguments, plan=self.plan, out_dtype=dtype)
        if self.groups is None:
            return out
        merged, _ = merge_over_ranks(out[:replicated], lse[:replicated], self.groups, out_dtype=q.dtype)
        return jnp.concatenate([merged, out[replicated:].astype(q.dtype)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _ShardedRows:
    """Attention of rows sharded over the ranks: to each other, and to the cached pages of all ranks.

    Attributes:
      hops: in pass-Q the metadata and the plan of the queries that are here after each hop; in pass-KV the `Tokens` of
        the keys.
      message: in pass-KV the pages that this rank sends, and which of their keys are cached.
    """

    order: Array
    queries: Tokens
    keys: Tokens
    hops: list[Any]
    message: tuple[Array, Array] | None
    shape: Shape = dataclasses.field(metadata={"static": True})

    @classmethod
    def make(cls, inputs: RowInputs, tables: PageTables, shape: Shape, num_heads: int, pool: Array) -> Self:
        positions, slots, order = inputs.sharded_positions, inputs.sharded_slots, inputs.sharded_order
        # The cached keys of a sequence are those before its first new token.
        big = jnp.iinfo(jnp.int32).max
        starts = jnp.full_like(tables.table[:, 0], big)
        starts = starts.at[jnp.maximum(slots, 0)].min(jnp.where(slots >= 0, positions, big))
        starts = jnp.where(starts == big, 0, starts)
        queries = Tokens(inputs.positions[: shape.sharded], inputs.slots[: shape.sharded])
        message, hops = None, list[Any]()
        if shape.exchange == "pass_kv":
            pages, is_cached, keys = _message_of_pass_kv(inputs, tables, shape, starts)
            message = pages, is_cached
            gathered = gather_tokens(keys, "context")
            hops = [Tokens(*(x[ring_source("context", hop)] for x in gathered)) for hop in range(shape.ranks)]
        else:
            for hop in range(shape.ranks):
                source = ring_source("context", hop)
                metadata = (starts, *(x.reshape(shape.ranks, -1)[source] for x in (positions, slots)))
                hops.append((metadata, plan_paged_attention(num_heads, pool, *tables, *metadata)))
        return cls(order, queries, Tokens(positions[order], slots[order]), hops, message, shape)

    def __call__(self, cache: PagedCache, tables: PageTables, first_page: Array, q: Array, gathered: Array) -> Array:
        kv = gathered[self.order]
        tokens = (self.queries.positions, self.keys.positions, self.queries.segments, self.keys.segments)
        new = attention(q, kv[:, 0], kv[:, 1], *tokens, out_dtype=jnp.float32)
        exchange = self._pass_q if self.message is None else self._pass_kv
        cached = exchange(cache, tables, first_page, q)
        return merge_state(*new, *cached)[0].astype(q.dtype)

    def _pass_q(self, cache: PagedCache, tables: PageTables, first_page: Array, q: Array) -> State:
        def attend_to_local_pages(q: Array, queries: tuple[RowMetadata, PagedPlan]) -> State:
            metadata, plan = queries
            arguments = (*tables, *metadata, first_page)
            out, lse = paged_attention(q[0], cache.k, cache.v, *arguments, plan=plan, out_dtype=jnp.float32)
            return out[None], lse[None]

        out, lse = pass_q_forward(q[None], self.hops.__getitem__, attend_to_local_pages, axis_name="context")
        return out[0], lse[0]

    def _pass_kv(self, cache: PagedCache, tables: PageTables, first_page: Array, q: Array) -> State:
        assert self.message is not None
        message_pages, is_cached = self.message

        def message(pages: Array) -> Array:
            x = from_bits(pages[first_page + message_pages], q.dtype).reshape(-1, *pages.shape[2:])
            # Unwritten tokens of a page may hold NaN, and an attention weight of 0 times NaN is NaN.
            return jnp.where(is_cached[:, None, None], x, jnp.zeros_like(x))[None]

        kernel = check_kernel(q, True, None, None)
        queries = Tokens(*(x[None] for x in self.queries))
        operands = Operands(q[None], message(cache.k), message(cache.v), queries, self.hops[0])
        out, lse = pass_kv_forward(match_varying(operands), self.hops.__getitem__, kernel=kernel, axis_name="context")
        return out[0], lse[0]


def _message_of_pass_kv(
    inputs: RowInputs, tables: PageTables, shape: Shape, starts: Array
) -> tuple[Array, Array, Tokens]:
    """List the cached pages of the sharded sequences, one sequence after the other, and label their keys.

    Returns:
      (pages `[message]`; which of their keys are cached, `[message * page_size]`; their keys' `Tokens` `[1, ...]`).
    """
    page_size, slots = shape.page_size, inputs.message_slots
    page_index = tables.numbered
    # Entries with cached keys come first in a slot's row of the table, so a count identifies them.
    cached_entries = page_index[jnp.maximum(slots, 0)] * page_size < starts[jnp.maximum(slots, 0)][:, None]
    ends = jnp.cumsum(jnp.where(slots >= 0, jnp.sum(cached_entries, 1), 0), dtype=jnp.int32)
    number = jnp.arange(shape.message, dtype=jnp.int32)
    of = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    of = jnp.minimum(of, slots.shape[0] - 1)
    entry = number - jnp.where(of > 0, ends[of - 1], 0)
    slot = jnp.where(number < ends[-1], slots[of], -1)
    entry = jnp.where(slot >= 0, entry, 0)
    pages = jnp.where(slot >= 0, tables.table[jnp.maximum(slot, 0), entry], 0)
    start = page_index[jnp.maximum(slot, 0), entry] * page_size
    at = start[:, None] + jnp.arange(page_size, dtype=jnp.int32)[None]
    is_cached = (slot >= 0)[:, None] & (at < starts[jnp.maximum(slot, 0)][:, None])
    segments = jnp.where(is_cached, slot[:, None], -1)
    keys = Tokens(jnp.where(is_cached, at, 0).reshape(1, -1), segments.reshape(1, -1))
    return pages, is_cached.reshape(-1), keys
