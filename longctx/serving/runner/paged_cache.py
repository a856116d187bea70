"""The paged cache on devices, and how many pages fit into their memory."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from longctx.kernels import write_pages
from longctx.kernels.bits import bits_dtype
from longctx.models import LlamaConfig
from longctx.models.layer_runs import layers_per_stage


class PagedCache(NamedTuple):
    """Keys and values `[layers * pages, page_size, K, H]`, 16-bit floats as their bits.

    Layer i of a stage has the pages from `i * pages` on. Layers share one pool because XLA's CPU backend would copy the
    whole pool to slice a layer out of it. Over a mesh, every stage holds the pages of as many layers as the largest
    has, and the pool is the concatenation of the ranks' pages.
    """

    k: Shaped[Array, "layers_pages page_size K H"]
    v: Shaped[Array, "layers_pages page_size K H"]
    k_scale: Float[Array, "layers_pages K page_size"] | None = None
    v_scale: Float[Array, "layers_pages K page_size"] | None = None

    @classmethod
    def empty(
        cls,
        config: LlamaConfig,
        num_pages: int,
        page_size: int,
        dtype: DTypeLike,
        device: Any = None,
        num_ranks: int = 1,
        num_stages: int = 1,
    ) -> Self:
        """Zeros on a device or in a sharding, with `num_pages` on each of `num_ranks` ranks of each stage."""
        layers = num_stages * layers_per_stage(config.num_layers, num_stages)
        shape = (layers * num_ranks * num_pages, page_size, config.num_kv_heads, config.head_dim)
        k, v = (jnp.zeros(shape, bits_dtype(dtype), device=device) for _ in range(2))
        return cls(k, v)


class NewKeys(NamedTuple):
    """A layer's new keys, and where this rank keeps those that it keeps.

    Attributes:
      kv: keys and values of this rank's rows, `[rows, 2, K, H]`, sharded rows first.
      pages, offsets: `[written]` int32, page of the pool and token in it, of the sharded rows of all ranks, rank after
        rank, then of this rank's other rows; page -1: another rank keeps it.
    """

    kv: Shaped[Array, "rows 2 K H"]
    pages: Int[Array, "written"]
    offsets: Int[Array, "written"]

    def write(self, cache: PagedCache, kv: Shaped[Array, "count 2 K H"], first: int | Array) -> PagedCache:
        """Write such rows, of which the first one is number `first` among `pages`."""
        pages, offsets = (lax.dynamic_slice_in_dim(x, first, kv.shape[0]) for x in (self.pages, self.offsets))
        return PagedCache(*write_pages(*cache[:2], kv[:, 0], kv[:, 1], pages, offsets))


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


def default_num_pages(page_bytes: int, device: jax.Device, max_pages: int, reserved_bytes: int = 0) -> int:
    """How many pages fit into 1 GiB on a CPU, or nine tenths of an accelerator's free memory; at most `max_pages`.

    Args:
      page_bytes: of the keys and values of a page on the device.
      reserved_bytes: memory that is free now, and that arrays still to be placed will take.

    Raises:
      ValueError: not one page fits.
    """
    memory = device.memory_stats() if device.platform != "cpu" else None
    free = (1 << 30) if memory is None else int(0.9 * (memory["bytes_limit"] - memory["bytes_in_use"] - reserved_bytes))
    fit = free // page_bytes
    if fit < 1:
        raise ValueError(f"num_pages: {device} has no memory left for a page of {page_bytes:,} bytes")
    return min(fit, max_pages)
