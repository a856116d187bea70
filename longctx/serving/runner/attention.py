"""Attention of a step's rows to pages that are sharded over context ranks, inside `jax.shard_map`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int, Shaped

from longctx.kernels import paged_attention, plan_paged_attention
from longctx.kernels.paged_attention import PagedPlan
from longctx.parallel.helix import merge_to_heads
from longctx.parallel.kvp import merge_over_ranks
from longctx.serving.runner.ffn_rows import FfnRows
from longctx.serving.runner.gathered_keys import GatheredKeys, RowMetadata
from longctx.serving.runner.key_ring import KeyRing
from longctx.serving.runner.paged_cache import NewKeys, PagedCache, PageTables
from longctx.serving.runner.step_inputs import RowInputs, Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """The `attend` callable of a step, which carries a `PagedCache` through the model's layers.

    In every layer all rows write their keys and values into their pages, and every row attends to the keys of its
    sequence up to its own position. Local rows attend to the pages of their rank. Replicated rows do so on each rank,
    and their states are merged. Sharded rows attend to the keys of all ranks, by the exchange of the step.

    It is a pytree, so that one program can make it and the programs of the layers can use it.
    """

    tables: PageTables
    pages: Int[Array, "written"]
    offsets: Int[Array, "written"]
    sharded: KeyRing | GatheredKeys | None
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
        dtype: DTypeLike,
    ) -> "PagedAttend":
        """Derive what all layers of a step share.

        Args:
          inputs: this rank's rows.
          shape: static sizes of the step.
          num_heads: query heads on this device.
          pool: the key pages; only its shape and dtype are used.
          dtype: of queries.
        """
        has_unsharded = shape.replicated or shape.local
        sharded: KeyRing | GatheredKeys | None = None
        if shape.sharded and shape.exchange == "pass_kv":
            sharded = KeyRing.make(inputs, tables, shape, num_heads, pool, dtype)
        elif shape.sharded:
            sharded = GatheredKeys.make(inputs, tables, shape, num_heads, pool, dtype)
        return cls(
            tables,
            inputs.pages,
            inputs.offsets,
            sharded,
            _UnshardedRows.make(inputs, tables, shape, num_heads, pool, dtype) if has_unsharded else None,
            shape,
        )

    def __call__(self, cache: PagedCache, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, PagedCache]:
        sharded, first_page = self.shape.sharded, layer * self.shape.num_pages
        pages = jnp.where(self.pages >= 0, self.pages + first_page, -1)
        new = NewKeys.of(cache, *_finite_values(k, v), pages, self.offsets)
        no_rows = q[:0]
        out, replicated, local = no_rows, no_rows, no_rows
        # Rows of the other kinds come last: what reads the cache after all have written needs no copy of it.
        if self.sharded is None:
            cache = new.write(cache, new.kv, 0)
        else:
            out, cache = self.sharded(cache, self.tables, first_page, q[:sharded], new)
        if self.unsharded is not None:
            replicated, local = self.unsharded(cache, self.tables, first_page, q[sharded:])
        if self.shape.shares_ffn:
            return FfnRows.of(self.shape).heads(out, replicated, local), cache
        outs = [rows for rows in (out, replicated, local) if rows.shape[0]]
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
    def make(
        cls, inputs: RowInputs, tables: PageTables, shape: Shape, num_heads: int, pool: Array, dtype: DTypeLike
    ) -> "_UnshardedRows":
        slots, positions = inputs.slots[shape.sharded :], inputs.positions[shape.sharded :]
        empty = jnp.zeros_like(tables.table[:, 0])
        lengths = empty.at[jnp.maximum(slots, 0)].max(jnp.where(slots >= 0, positions + 1, 0))
        metadata = (lengths, positions, slots)
        # No more rows than requests may run are most often all decodes; of more some are of a chunk.
        most = 1 if shape.replicated + shape.local <= shape.samples else None
        plan = plan_paged_attention(num_heads, pool, *tables, *metadata, q_dtype=dtype, max_rows_per_sequence=most)
        return cls(inputs.groups.reshape(shape.ranks, -1) if shape.replicated else None, metadata, plan, shape)

    def __call__(self, cache: PagedCache, tables: PageTables, first_page: Array, q: Array) -> tuple[Array, Array]:
        """The results of replicated and of local rows; of the former this rank's heads, if ranks share what follows."""
        replicated = self.shape.replicated
        # Partial states stay float32 until they are merged.
        dtype = jnp.float32 if replicated else None
        arguments = (*tables, *self.metadata, first_page)
        out, lse = paged_attention(q, cache.k, cache.v, *arguments, plan=self.plan, out_dtype=dtype, **cache.scales)
        local = out[replicated:].astype(q.dtype)
        if self.groups is None:
            return out[:replicated], local
        state = out[:replicated], lse[:replicated]
        if self.shape.shares_ffn:
            merged, _ = merge_to_heads(*state)
        else:
            merged, _ = merge_over_ranks(*state, self.groups, out_dtype=q.dtype)
        return merged.astype(q.dtype), local
