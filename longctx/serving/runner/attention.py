"""Attention of a step's rows to pages that are sharded over context ranks, inside `jax.shard_map`."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, Shaped

from longctx.kernels import attention, merge_state, paged_attention, plan_paged_attention, write_pages
from longctx.kernels.attention.kernel import Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import check_kernel, match_varying
from longctx.kernels.bits import from_bits
from longctx.models.llama import Attend
from longctx.parallel.exchange import gather_tokens
from longctx.parallel.kvp import merge_over_ranks
from longctx.parallel.pass_kv import pass_kv_forward
from longctx.parallel.pass_q import pass_q_forward
from longctx.parallel.ring import ring_source
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.step_inputs import RowInputs, Shape

State = tuple[Array, Array]
"""A partial attention result, `(out, lse)`."""

Metadata = tuple[Array, Array | None, Array, Array, Array]
"""Arguments of `paged_attention`: page table, page index, key lengths, and the rows' positions and slots."""


def make_paged_attend(
    inputs: RowInputs,
    table: Int[Array, "slots entries"],
    page_index: Int[Array, "slots entries"] | None,
    shape: Shape,
    num_heads: int,
    pool: Shaped[Array, "pages page_size K H"],
) -> Attend:
    """Make the `attend` callable of a step, which carries a `PagedCache` through the model's layers.

    In every layer the rows first write their keys and values into their pages. Then every row attends to the keys of
    its sequence up to its own position. Local rows attend to the pages of their rank. Replicated rows do so on each
    rank, and their states are merged. Sharded rows attend to each other, and to the keys cached before this step by
    a ring over all ranks. Only the new keys and values of sharded rows are gathered.

    Args:
      inputs: this rank's rows.
      table: `[slots, entries]` int32, this rank's pages of each slot.
      page_index: `[slots, entries]` int32, which page of its sequence each entry is; None: entry m is page m. Unused
        entries have an index beyond any length.
      shape: static sizes of the step.
      num_heads: query heads on this device.
      pool: the key pages; only its shape and dtype are used.
    """
    unsharded = _UnshardedRows(inputs, table, page_index, shape, num_heads, pool)
    sharded = _ShardedRows(inputs, table, page_index, shape, num_heads, pool) if shape.sharded else None

    def attend(cache: PagedCache, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, PagedCache]:
        first_page = layer * shape.num_pages
        gathered = None
        written = jnp.stack([k, v], 1)
        if sharded is not None:
            new, others = jnp.split(written, [shape.sharded])
            gathered = lax.all_gather(new, "context", tiled=True)
            written = jnp.concatenate([gathered, others])
        pages = jnp.where(inputs.pages >= 0, inputs.pages + first_page, -1)
        cache = PagedCache(*write_pages(cache.k, cache.v, written[:, 0], written[:, 1], pages, inputs.offsets))
        outs = []
        if sharded is not None and gathered is not None:
            outs.append(sharded(cache, first_page, q[: shape.sharded], gathered))
        if shape.replicated or shape.local:
            outs.append(unsharded(cache, first_page, q[shape.sharded :]))
        return (outs[0] if len(outs) == 1 else jnp.concatenate(outs)), cache

    return attend


class _UnshardedRows:
    """Attention of replicated and local rows, which need the pages of their own rank only."""

    def __init__(
        self, inputs: RowInputs, table: Array, page_index: Array | None, shape: Shape, num_heads: int, pool: Array
    ) -> None:
        self.shape = shape
        self.groups = inputs.groups.reshape(shape.ranks, -1) if shape.replicated else None
        slots, positions = inputs.slots[shape.sharded :], inputs.positions[shape.sharded :]
        lengths = jnp.zeros_like(table[:, 0]).at[jnp.maximum(slots, 0)].max(jnp.where(slots >= 0, positions + 1, 0))
        self.metadata = (table, page_index, lengths, positions, slots)
        self.plan = plan_paged_attention(num_heads, pool, *self.metadata)

    def __call__(self, cache: PagedCache, first_page: Array, q: Array) -> Array:
        replicated = self.shape.replicated
        # Partial states stay float32 until they are merged.
        dtype = jnp.float32 if replicated else None
        out, lse = paged_attention(
            q, cache.k, cache.v, *self.metadata, first_page=first_page, plan=self.plan, out_dtype=dtype
        )
        if self.groups is None:
            return out
        merged, _ = merge_over_ranks(out[:replicated], lse[:replicated], self.groups, out_dtype=q.dtype)
        return jnp.concatenate([merged, out[replicated:].astype(q.dtype)])


class _ShardedRows:
    """Attention of rows sharded over the ranks: to each other, and to the cached pages of all ranks."""

    def __init__(
        self, inputs: RowInputs, table: Array, page_index: Array | None, shape: Shape, num_heads: int, pool: Array
    ) -> None:
        self.shape, self.table, self.page_index = shape, table, page_index
        positions, slots = inputs.sharded_positions, inputs.sharded_slots
        # The cached keys of a sequence are those before its first new token.
        big = jnp.iinfo(jnp.int32).max
        starts = jnp.full_like(table[:, 0], big).at[jnp.maximum(slots, 0)].min(jnp.where(slots >= 0, positions, big))
        self.starts = jnp.where(starts == big, 0, starts)
        self.order = inputs.sharded_order
        self.queries = Tokens(inputs.positions[: shape.sharded], inputs.slots[: shape.sharded])
        self.keys = Tokens(positions[self.order], slots[self.order])
        if shape.exchange == "pass_kv":
            self._prepare_pass_kv(inputs)
        else:
            self._prepare_pass_q(positions, slots, num_heads, pool)

    def __call__(self, cache: PagedCache, first_page: Array, q: Array, gathered: Array) -> Array:
        kv = gathered[self.order]
        tokens = (self.queries.positions, self.keys.positions, self.queries.segments, self.keys.segments)
        new = attention(q, kv[:, 0], kv[:, 1], *tokens, out_dtype=jnp.float32)
        exchange = self._pass_kv if self.shape.exchange == "pass_kv" else self._pass_q
        cached = exchange(cache, first_page, q)
        return merge_state(*new, *cached)[0].astype(q.dtype)

    def _prepare_pass_q(self, positions: Array, slots: Array, num_heads: int, pool: Array) -> None:
        def queries_of(hop: int) -> Any:
            source = ring_source("context", hop)
            at, of = (x.reshape(self.shape.ranks, -1)[source] for x in (positions, slots))
            metadata = (self.table, self.page_index, self.starts, at, of)
            return metadata, plan_paged_attention(num_heads, pool, *metadata)

        hops = [queries_of(hop) for hop in range(self.shape.ranks)]
        self.queries_of = hops.__getitem__

    def _pass_q(self, cache: PagedCache, first_page: Array, q: Array) -> State:
        def attend_to_local_pages(q: Array, queries: Any) -> State:
            metadata: Metadata = queries[0]
            plan = queries[1]
            out, lse = paged_attention(
                q[0], cache.k, cache.v, *metadata, first_page=first_page, plan=plan, out_dtype=jnp.float32
            )
            return out[None], lse[None]

        out, lse = pass_q_forward(q[None], self.queries_of, attend_to_local_pages, axis_name="context")
        return out[0], lse[0]

    def _prepare_pass_kv(self, inputs: RowInputs) -> None:
        """List the cached pages of the sharded sequences, one sequence after the other, and label their keys."""
        page_size, slots = self.shape.page_size, inputs.message_slots
        page_index = self._page_index()
        # Entries with cached keys come first in a slot's row of the table, so a count identifies them.
        cached_entries = page_index[jnp.maximum(slots, 0)] * page_size < self.starts[jnp.maximum(slots, 0)][:, None]
        ends = jnp.cumsum(jnp.where(slots >= 0, jnp.sum(cached_entries, 1), 0), dtype=jnp.int32)
        number = jnp.arange(self.shape.message, dtype=jnp.int32)
        of = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
        of = jnp.minimum(of, slots.shape[0] - 1)
        entry = number - jnp.where(of > 0, ends[of - 1], 0)
        slot = jnp.where(number < ends[-1], slots[of], -1)
        entry = jnp.where(slot >= 0, entry, 0)
        self.message_pages = jnp.where(slot >= 0, self.table[jnp.maximum(slot, 0), entry], 0)
        start = page_index[jnp.maximum(slot, 0), entry] * page_size
        at = start[:, None] + jnp.arange(page_size, dtype=jnp.int32)[None]
        cached = (slot >= 0)[:, None] & (at < self.starts[jnp.maximum(slot, 0)][:, None])
        keys = Tokens(jnp.where(cached, at, 0).reshape(1, -1), jnp.where(cached, slot[:, None], -1).reshape(1, -1))
        gathered = gather_tokens(keys, "context")
        hops = [Tokens(*(x[ring_source("context", hop)] for x in gathered)) for hop in range(self.shape.ranks)]
        self.keys_of = hops.__getitem__
        self.is_cached = cached.reshape(-1)

    def _pass_kv(self, cache: PagedCache, first_page: Array, q: Array) -> State:
        def message(pages: Array) -> Array:
            x = from_bits(pages[first_page + self.message_pages], q.dtype).reshape(-1, *pages.shape[2:])
            # Unwritten tokens of a page may hold NaN, and an attention weight of 0 times NaN is NaN.
            return jnp.where(self.is_cached[:, None, None], x, jnp.zeros_like(x))[None]

        kernel = check_kernel(q, True, None, None)
        queries = Tokens(*(x[None] for x in self.queries))
        operands = Operands(q[None], message(cache.k), message(cache.v), queries, self.keys_of(0))
        out, lse = pass_kv_forward(match_varying(operands), self.keys_of, kernel=kernel, axis_name="context")
        return out[0], lse[0]

    def _page_index(self) -> Array:
        if self.page_index is not None:
            return self.page_index
        return jnp.broadcast_to(jnp.arange(self.table.shape[1], dtype=jnp.int32)[None], self.table.shape)
