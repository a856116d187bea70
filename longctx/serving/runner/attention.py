"""Attention of a step's rows to pages that are sharded over context ranks, inside `jax.shard_map`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from longctx.kernels import paged_attention
from longctx.kernels.merge import with_sinks
from longctx.kernels.paged_attention import PagedPlan
from longctx.kernels.partitioning import match_varying
from longctx.parallel.exchange import part_of_rank
from longctx.parallel.helix import merge_to_heads
from longctx.parallel.kvp import merge_over_ranks
from longctx.serving.runner.ffn_rows import FfnRows
from longctx.serving.runner.gathered_keys import GatheredKeys
from longctx.serving.runner.key_ring import KeyRing
from longctx.serving.runner.paged_cache import LayerInputs, NewKeys, PagedCache, PageTables, RowMetadata
from longctx.serving.runner.step_inputs import Shape


class WindowLayers(NamedTuple):
    """Metadata of sliding layers, the same for all of them.

    Attributes:
      size: tokens that a query sees, itself included.
      table: `[slots, entries]`, this rank's window pages.
      first_pages: int32 `[places]`, first page of the layer in each place of the stage, see `LayerPages`.
    """

    size: int
    table: Int[Array, "slots entries"]
    first_pages: Int[Array, "places"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """The `attend` callable of a step, which carries a `PagedCache` through the model's layers.

    In every layer all rows write their keys and values into their pages, and every row attends to the keys of its
    sequence up to its own position. Local rows attend to the pages of their rank. Replicated rows do so on each rank,
    and their states are merged. Sharded rows attend to the keys of all ranks, by the exchange of the step.

    Which layers slide is data, as all layers of all stages are one program: what differs is derived for both kinds
    once, and each layer selects its own.

    It is a pytree, so that one program can make it and the programs of the layers can use it.

    Attributes:
      full, sliding: for layers of each kind; None: no layer is sliding.
      offsets: token in its page of each row that is written.
      first_pages: as of `WindowLayers`.
    """

    full: "_LayerRows"
    sliding: "_LayerRows | None"
    offsets: Int[Array, "written"]
    first_pages: Int[Array, "places"] | None
    shape: Shape = dataclasses.field(metadata={"static": True})

    @classmethod
    def make(cls, inputs: LayerInputs, window: WindowLayers | None = None) -> "PagedAttend":
        """Derive what all layers of a step share; `window`: of a model with sliding layers."""
        rows, shape = inputs.rows, inputs.shape
        if window is None:
            return cls(_LayerRows.make(inputs), None, rows.offsets, None, shape)
        before = window.size - 1
        full = _LayerRows.make(inputs._replace(first_of=jnp.zeros_like))
        sliding = inputs._replace(
            rows=rows._replace(pages=rows.window_pages),
            tables=inputs.tables._replace(table=window.table),
            first_of=lambda positions: positions - before,
        )
        return cls(full, _LayerRows.make(sliding).sharing(full), rows.offsets, window.first_pages, shape)

    def __call__(
        self,
        cache: PagedCache,
        layer: Array,
        q: Array,
        k: Array,
        v: Array,
        *,
        is_sliding: Array | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, PagedCache]:
        rows, sharded = self._rows_of(is_sliding), self.shape.sharded
        first_page = layer * self.shape.num_pages if self.first_pages is None else self.first_pages[layer]
        pages = jnp.where(rows.pages >= 0, rows.pages + first_page, -1)
        new = NewKeys.of(cache, *_finite_values(k, v), pages, self.offsets)
        no_rows = q[:0]
        out, replicated, local = no_rows, no_rows, no_rows
        # Rows of the other kinds come last: what reads the cache after all have written needs no copy of it.
        if rows.sharded is None:
            cache = new.write(cache, new.kv, 0)
        else:
            out, cache = rows.sharded(cache, rows.tables, first_page, q[:sharded], new, sinks)
        if rows.unsharded is not None:
            replicated, local = rows.unsharded(cache, rows.tables, first_page, q[sharded:], sinks)
        if self.shape.shares_ffn:
            return FfnRows.of(self.shape).heads(out, replicated, local), cache
        outs = [part for part in (out, replicated, local) if part.shape[0]]
        return (outs[0] if len(outs) == 1 else jnp.concatenate(outs)), cache

    @property
    def tables_of_state(self) -> dict[str, Array | None]:
        """The page tables, as fields of `DeviceState`."""
        window_table = None if self.sliding is None else self.sliding.tables.table
        return self.full.tables._asdict() | {"window_table": window_table}

    def _rows_of(self, is_sliding: Array | None) -> "_LayerRows":
        if self.sliding is None:
            return self.full
        if is_sliding is None:
            raise ValueError("is_sliding must be given in a model with sliding layers")
        return jax.tree.map(lambda x, y: x if x is y else jnp.where(is_sliding, x, y), self.sliding, self.full)


def _finite_values(k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values `[T, K, H]` with finite values: a key is NaN where it or its value was not finite.

    A mask on the scores gives the keys of other sequences the weight 0, but 0 times a value of NaN is NaN. Queries that
    see the key get NaN, as they would have.
    """
    is_finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), -1, keepdims=True)
    return jnp.where(is_finite, k, jnp.nan), jnp.where(is_finite, v, jnp.zeros_like(v))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _LayerRows:
    """The metadata that layers of one kind share in a step: of what rows write, and of what they attend to."""

    tables: PageTables
    pages: Int[Array, "written"]
    sharded: KeyRing | GatheredKeys | None
    unsharded: "_UnshardedRows | None"

    @classmethod
    def make(cls, inputs: LayerInputs) -> "_LayerRows":
        shape, sharded = inputs.shape, None
        if shape.sharded:
            sharded = (KeyRing if shape.exchange == "pass_kv" else GatheredKeys).make(inputs)
        has_unsharded = shape.replicated or shape.local
        unsharded = _UnshardedRows.make(inputs) if has_unsharded else None
        return cls(inputs.tables, inputs.rows.pages, sharded, unsharded)

    def sharing(self, other: "_LayerRows") -> "_LayerRows":
        """Return these with the arrays of the other kind where both have the same."""
        return dataclasses.replace(
            self, sharded=_share(self.sharded, other.sharded), unsharded=_share(self.unsharded, other.unsharded)
        )


def _share(part: Any, other: Any) -> Any:
    if part is None:
        return None
    return dataclasses.replace(part, **{name: getattr(other, name) for name in part.same_in_all_layers})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _UnshardedRows:
    """Attention of replicated and local rows, which need the pages of their own rank only."""

    same_in_all_layers = ("groups",)

    groups: Array | None
    metadata: RowMetadata
    plan: PagedPlan
    shape: Shape = dataclasses.field(metadata={"static": True})

    @classmethod
    def make(cls, inputs: LayerInputs) -> "_UnshardedRows":
        rows, shape = inputs.rows, inputs.shape
        slots, positions = rows.slots[shape.sharded :], rows.positions[shape.sharded :]
        empty = jnp.zeros_like(inputs.tables.table[:, 0])
        lengths = empty.at[jnp.maximum(slots, 0)].max(jnp.where(slots >= 0, positions + 1, 0))
        metadata = inputs.metadata(lengths, positions, slots)
        # No more rows than requests may run are most often all decodes; of more some are of a chunk.
        most = 1 if shape.replicated + shape.local <= shape.samples else None
        plan = inputs.plan(metadata, max_rows_per_sequence=most)
        return cls(rows.groups.reshape(shape.ranks, -1) if shape.replicated else None, metadata, plan, shape)

    def __call__(
        self, cache: PagedCache, tables: PageTables, first_page: Array, q: Array, sinks: Array | None
    ) -> tuple[Array, Array]:
        """The results of replicated and of local rows; of the former this rank's heads, if ranks share what follows."""
        replicated = self.shape.replicated
        # Partial states stay float32 until they are merged, and until sinks, which count once, are added.
        dtype = jnp.float32 if replicated or sinks is not None else None
        options: Any = self.metadata._asdict() | cache.scales | {"plan": self.plan, "out_dtype": dtype}
        out, lse = paged_attention(q, cache.k, cache.v, *tables, first_page=first_page, **options)
        local, _ = with_sinks((out[replicated:], lse[replicated:]), sinks)
        state = out[:replicated], lse[:replicated]
        if self.groups is not None and self.shape.shares_ffn:
            state = merge_to_heads(*state)
            sinks = None if sinks is None else part_of_rank(match_varying(sinks, "context"), "context", 0)
        elif self.groups is not None:
            state = merge_over_ranks(*state, self.groups, out_dtype=q.dtype if sinks is None else None)
        return with_sinks(state, sinks)[0].astype(q.dtype), local.astype(q.dtype)
