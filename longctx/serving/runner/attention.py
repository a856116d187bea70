"""Attention of a step's rows to pages that are spread over ranks, inside `jax.shard_map`."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

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
from longctx.serving.runner.step_inputs import RowPlan, Shape

State = tuple[Array, Array]
# Page table and numbers, lengths, and the rows' positions and slots: what `paged_attention` asks for.
Metadata = tuple[Array, Array | None, Array, Array, Array]


def attend_to_pages(
    plan: RowPlan, table: Array, numbers: Array | None, shape: Shape, num_heads: int, pool: Array
) -> Attend:
    """An `attend` for the rows of a step, carrying a `PagedCache`; its `pool` is looked at for its shape only.

    Every layer writes the rows' keys and values into their pages, then attends to all up to each: rows of one rank to
    its pages; shared rows likewise, and the states of their ranks merge; sharded rows to one another, and to what was
    there before them by a ring over all ranks. Only sharded rows' new keys and values are gathered.

    Args:
      table, numbers: `[slots, entries]`, this rank's pages of each slot, and which page of its sequence each is; None:
        in order. Entries that are not in use have numbers beyond any length.
      num_heads: of this device's queries.
    """
    local = _Local(plan, table, numbers, shape, num_heads, pool)
    ring = _Sharded(plan, table, numbers, shape, num_heads, pool) if shape.sharded else None

    def attend(cache: PagedCache, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, PagedCache]:
        first = layer * shape.num_pages
        gathered = None
        written = jnp.stack([k, v], 1)
        if ring is not None:
            new, own = jnp.split(written, [shape.sharded])
            gathered = lax.all_gather(new, "context", tiled=True)
            written = jnp.concatenate([gathered, own])
        pages = jnp.where(plan.pages >= 0, plan.pages + first, -1)
        cache = PagedCache(*write_pages(cache.k, cache.v, written[:, 0], written[:, 1], pages, plan.offsets))
        outs = []
        if ring is not None and gathered is not None:
            outs.append(ring.attend(cache, first, q[: shape.sharded], gathered))
        if shape.replicated or shape.local:
            outs.append(local.attend(cache, first, q[shape.sharded :]))
        return (outs[0] if len(outs) == 1 else jnp.concatenate(outs)), cache

    return attend


class _Local:
    """Rows to pages of their own rank: those of one rank, and shared ones."""

    def __init__(
        self, plan: RowPlan, table: Array, numbers: Array | None, shape: Shape, num_heads: int, pool: Array
    ) -> None:
        self.shape = shape
        self.groups = plan.groups.reshape(shape.ranks, -1) if shape.replicated else None
        slots, positions = plan.slots[shape.sharded :], plan.positions[shape.sharded :]
        lengths = jnp.zeros_like(table[:, 0]).at[jnp.maximum(slots, 0)].max(jnp.where(slots >= 0, positions + 1, 0))
        self.metadata = (table, numbers, lengths, positions, slots)
        self.plan = plan_paged_attention(num_heads, pool, *self.metadata)

    def attend(self, cache: PagedCache, first: Array, q: Array) -> Array:
        shared = self.shape.replicated
        dtype = jnp.float32 if shared else None
        out, lse = paged_attention(
            q, cache.k, cache.v, *self.metadata, first_page=first, plan=self.plan, out_dtype=dtype
        )
        if self.groups is None:
            return out
        merged, _ = merge_over_ranks(out[:shared], lse[:shared], self.groups, out_dtype=q.dtype)
        return jnp.concatenate([merged, out[shared:].astype(q.dtype)])


class _Sharded:
    """Rows that are sharded over the ranks: to one another, and to pages of all ranks."""

    def __init__(
        self, plan: RowPlan, table: Array, numbers: Array | None, shape: Shape, num_heads: int, pool: Array
    ) -> None:
        self.shape, self.table, self.numbers = shape, table, numbers
        positions, slots = plan.sharded_positions, plan.sharded_slots
        # What is cached of a sequence comes before its first new token.
        big = jnp.iinfo(jnp.int32).max
        starts = jnp.full_like(table[:, 0], big).at[jnp.maximum(slots, 0)].min(jnp.where(slots >= 0, positions, big))
        self.starts = jnp.where(starts == big, 0, starts)
        self.order = plan.sharded_order
        self.queries = Tokens(plan.positions[: shape.sharded], plan.slots[: shape.sharded])
        self.keys = Tokens(positions[self.order], slots[self.order])
        if shape.exchange == "pass_kv":
            self._plan_pass_kv(plan)
        else:
            self._plan_pass_q(positions, slots, num_heads, pool)

    def attend(self, cache: PagedCache, first: Array, q: Array, gathered: Array) -> Array:
        kv = gathered[self.order]
        tokens = (self.queries.positions, self.keys.positions, self.queries.segments, self.keys.segments)
        new = attention(q, kv[:, 0], kv[:, 1], *tokens, out_dtype=jnp.float32)
        old = self._pass_kv(cache, first, q) if self.shape.exchange == "pass_kv" else self._pass_q(cache, first, q)
        return merge_state(*new, *old)[0].astype(q.dtype)

    def _plan_pass_q(self, positions: Array, slots: Array, num_heads: int, pool: Array) -> None:
        def queries_of(hop: int) -> Any:
            at, of = (x.reshape(self.shape.ranks, -1)[ring_source("context", hop)] for x in (positions, slots))
            metadata = (self.table, self.numbers, self.starts, at, of)
            return metadata, plan_paged_attention(num_heads, pool, *metadata)

        hops = [queries_of(hop) for hop in range(self.shape.ranks)]
        self.queries_of = hops.__getitem__

    def _pass_q(self, cache: PagedCache, first: Array, q: Array) -> State:
        def attend(q: Array, queries: Any) -> State:
            metadata: Metadata = queries[0]
            plan = queries[1]
            out, lse = paged_attention(
                q[0], cache.k, cache.v, *metadata, first_page=first, plan=plan, out_dtype=jnp.float32
            )
            return out[None], lse[None]

        out, lse = pass_q_forward(q[None], self.queries_of, attend, axis_name="context")
        return out[0], lse[0]

    def _plan_pass_kv(self, plan: RowPlan) -> None:
        """The cached pages of the sharded sequences, one sequence after the other, with slots and positions of keys."""
        page_size, slots = self.shape.page_size, plan.message_slots
        numbers = self._numbers()
        # Entries of a slot that hold something cached come first.
        counts = jnp.sum(numbers[jnp.maximum(slots, 0)] * page_size < self.starts[jnp.maximum(slots, 0)][:, None], 1)
        ends = jnp.cumsum(jnp.where(slots >= 0, counts, 0), dtype=jnp.int32)
        number = jnp.arange(self.shape.message, dtype=jnp.int32)
        of = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
        of = jnp.minimum(of, slots.shape[0] - 1)
        entry = number - jnp.where(of > 0, ends[of - 1], 0)
        slot = jnp.where(number < ends[-1], slots[of], -1)
        entry = jnp.where(slot >= 0, entry, 0)
        self.message_pages = self.table[jnp.maximum(slot, 0), entry]
        self.message_pages = jnp.where(slot >= 0, self.message_pages, 0)
        first = numbers[jnp.maximum(slot, 0), entry] * page_size
        at = first[:, None] + jnp.arange(page_size, dtype=jnp.int32)[None]
        cached = (slot >= 0)[:, None] & (at < self.starts[jnp.maximum(slot, 0)][:, None])
        keys = Tokens(jnp.where(cached, at, 0).reshape(1, -1), jnp.where(cached, slot[:, None], -1).reshape(1, -1))
        gathered = gather_tokens(keys, "context")
        hops = [Tokens(*(x[ring_source("context", hop)] for x in gathered)) for hop in range(self.shape.ranks)]
        self.keys_of = hops.__getitem__
        self.written = cached.reshape(-1)

    def _pass_kv(self, cache: PagedCache, first: Array, q: Array) -> State:
        def message(pages: Array) -> Array:
            x = from_bits(pages[first + self.message_pages], q.dtype).reshape(-1, *pages.shape[2:])
            # What is not written may hold NaN, which a weight of 0 doesn't undo.
            return jnp.where(self.written[:, None, None], x, jnp.zeros_like(x))[None]

        kernel = check_kernel(q, True, None, None)
        queries = Tokens(*(x[None] for x in self.queries))
        operands = Operands(q[None], message(cache.k), message(cache.v), queries, self.keys_of(0))
        out, lse = pass_kv_forward(match_varying(operands), self.keys_of, kernel=kernel, axis_name="context")
        return out[0], lse[0]

    def _numbers(self) -> Array:
        if self.numbers is not None:
            return self.numbers
        return jnp.broadcast_to(jnp.arange(self.table.shape[1], dtype=jnp.int32)[None], self.table.shape)
