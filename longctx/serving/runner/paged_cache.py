"""The paged cache on devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float32, Int, Shaped

from longctx.kernels import plan_paged_attention, write_pages
from longctx.kernels.bits import bits_dtype, from_bits
from longctx.kernels.fp8 import BITS, E4M3
from longctx.kernels.fp8_rows import join_packed, pack_rows, unpack_rows
from longctx.kernels.paged_attention import PagedPlan
from longctx.kernels.paged_attention.write import write_packed
from longctx.models import LlamaConfig
from longctx.serving.runner.layer_pages import LayerPages
from longctx.serving.runner.step_inputs import RowInputs, Shape


class PagedCache(NamedTuple):
    """Keys and values `[layers * pages, page_size, K, H]`, floats of 8 and 16 bits as their bits.

    FP8 pages have scales beside them, float32 `[layers * pages, K, page_size]`: a key is `e4m3 values * scale`.

    Layer i of a stage has the pages from `i * pages` on, or with sliding layers those of `LayerPages`. Layers share one
    pool because XLA's CPU backend would copy the whole pool to slice a layer out of it. Over a mesh, every stage holds
    the pages of as many layers as the largest has, and the pool is the concatenation of the ranks' pages.
    """

    k: Shaped[Array, "layers_pages page_size K H"]
    v: Shaped[Array, "layers_pages page_size K H"]
    k_scale: Float32[Array, "layers_pages K page_size"] | None = None
    v_scale: Float32[Array, "layers_pages K page_size"] | None = None

    @property
    def is_fp8(self) -> bool:
        return self.k_scale is not None

    @property
    def scales(self) -> dict[str, Any]:
        """Arguments of `paged_attention`."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    @classmethod
    def abstract(
        cls,
        config: LlamaConfig,
        num_pages: int,
        page_size: int,
        dtype: DTypeLike,
        num_ranks: int = 1,
        num_stages: int = 1,
        num_window_pages: int = 0,
    ) -> "PagedCache":
        """Shapes and dtypes, with `num_pages` and `num_window_pages` on each of `num_ranks` ranks of each stage."""
        pages = LayerPages.of(config, num_stages, num_pages, num_window_pages)
        shape = (num_stages * num_ranks * pages.total, page_size, config.num_kv_heads, config.head_dim)
        arrays = [jax.ShapeDtypeStruct(shape, bits_dtype(dtype))] * 2
        if jnp.dtype(dtype) == E4M3:
            arrays += [jax.ShapeDtypeStruct((shape[0], shape[2], shape[1]), jnp.float32)] * 2
        return cls(*arrays)  # type: ignore[arg-type]

    def read_pages(self, pages: Int[Array, "n"]) -> Shaped[Array, "2 n page_size K width"]:
        """Keys and values of some pages as they travel: the bits of 16-bit floats, packed rows of FP8 pages."""
        return self._read(lambda x: x[pages], lambda scale: jnp.swapaxes(scale[pages], 1, 2))

    def read_rows(self, page: Int[Array, "n"], offset: Int[Array, "n"]) -> Shaped[Array, "2 n K width"]:
        """Keys and values of some slots, as `read_pages`."""
        return self._read(lambda x: x[page, offset], lambda scale: scale[page, :, offset])

    def _read(self, rows_of: Callable[[Array], Array], scale_of: Callable[[Array], Array]) -> Array:
        rows = [rows_of(self.k), rows_of(self.v)]
        if self.k_scale is not None and self.v_scale is not None:
            scales = scale_of(self.k_scale), scale_of(self.v_scale)
            rows = [join_packed(*each) for each in zip(rows, scales, strict=True)]
        return jnp.stack(rows)


class NewKeys(NamedTuple):
    """A layer's new keys, and where this rank keeps those that it keeps.

    Attributes:
      kv: keys and values of this rank's rows, `[rows, 2, K, width]`, sharded rows first: H floats, or the `H + 4` bytes
        of packed rows for FP8 pages.
      pages, offsets: `[written]` int32, page of the pool and token in it, of the sharded rows of all ranks, rank after
        rank, then of this rank's other rows; page -1: another rank keeps it.
    """

    kv: Shaped[Array, "rows 2 K width"]
    pages: Int[Array, "written"]
    offsets: Int[Array, "written"]

    @classmethod
    def of(cls, cache: PagedCache, k: Array, v: Array, pages: Array, offsets: Array) -> "NewKeys":
        """From keys and values `[rows, K, H]`, which are quantised here, once, if the cache has FP8 pages."""
        if cache.is_fp8:
            k, v = pack_rows(k), pack_rows(v)
        return cls(jnp.stack([k, v], 1), pages, offsets)

    def write(self, cache: PagedCache, kv: Shaped[Array, "count 2 K width"], first: int | Array) -> PagedCache:
        """Write such rows, of which the first one is number `first` among `pages`."""
        pages, offsets = (lax.dynamic_slice_in_dim(x, first, kv.shape[0]) for x in (self.pages, self.offsets))
        if cache.k_scale is not None and cache.v_scale is not None:
            pools = (cache.k, cache.v, cache.k_scale, cache.v_scale)
            return PagedCache(*write_packed(pools, kv[:, 0], kv[:, 1], pages, offsets))
        return PagedCache(*write_pages(cache.k, cache.v, kv[:, 0], kv[:, 1], pages, offsets))


def as_floats(rows: Shaped[Array, "*rows width"], dtype: DTypeLike) -> Shaped[Array, "*rows H"]:
    """Keys and values as they travel, in the dtype of queries."""
    return unpack_rows(rows, dtype) if rows.dtype == BITS else from_bits(rows, dtype)


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


class RowMetadata(NamedTuple):
    """Arguments of `paged_attention` beside its page tables; `q_first` is None in a model without sliding layers."""

    kv_lengths: Array
    q_positions: Array
    q_sequence: Array
    q_first: Array | None


class LayerInputs(NamedTuple):
    """A step's rows, page tables and sizes, from which the attention of layers of one kind is derived.

    Attributes:
      rows: this rank's.
      num_heads: query heads on this device.
      pool: the key pages; only its shape and dtype are used.
      dtype: of queries.
      first_of: from positions of queries to the first positions that they see; None in a model without sliding layers.
    """

    rows: RowInputs
    tables: PageTables
    shape: Shape
    num_heads: int
    pool: Shaped[Array, "pages page_size K H"]
    dtype: DTypeLike
    first_of: Callable[[Array], Array] | None = None

    def first(self, positions: Array) -> Array | None:
        return None if self.first_of is None else self.first_of(positions)

    def metadata(self, lengths: Array, positions: Array, slots: Array) -> RowMetadata:
        return RowMetadata(lengths, positions, slots, self.first(positions))

    def plan(self, metadata: RowMetadata, **options: Any) -> PagedPlan:
        """Plan paged attention of these rows; options as for `plan_paged_attention`."""
        arguments = metadata._asdict() | {"q_dtype": self.dtype} | options
        return plan_paged_attention(self.num_heads, self.pool, *self.tables, **arguments)
