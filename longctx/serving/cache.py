"""The paged cache on a device, and attention of new tokens to it."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from longctx.kernels import paged_attention, plan_paged_attention, write_pages
from longctx.kernels.bits import bits_dtype
from longctx.models import LlamaConfig
from longctx.models.llama import Attend


class PagedCache(NamedTuple):
    """Keys and values `[layers * pages, page_size, K, H]`, 16-bit floats as their bits.

    Layer i has pages `i * pages` and on. As one pool, nothing of it is ever sliced out: XLA's CPU backend would copy
    the whole of it for that.
    """

    k: Array
    v: Array

    @classmethod
    def empty(cls, config: LlamaConfig, num_pages: int, page_size: int, dtype: DTypeLike, device: Any = None) -> Self:
        """Zeros, on a device or in a sharding."""
        shape = (config.num_layers * num_pages, page_size, config.num_kv_heads, config.head_dim)
        k, v = (jnp.zeros(shape, bits_dtype(dtype), device=device) for _ in range(2))
        return cls(k, v)


class Rows(NamedTuple):
    """The tokens of a step, int32 `[T]` each; where slots are negative there is none."""

    tokens: Array
    positions: Array
    slots: Array


def attend_to_pages(rows: Rows, table: Array, num_pages: int, num_heads: int, pool: Array) -> Attend:
    """An `attend` for the ragged rows of a step, carrying a `PagedCache`; its `pool` is looked at for its shape only.

    Writes their keys and values into the pages that `table` `[slots, entries]` names, then attends to everything up
    to each.
    """
    real, page_size = rows.slots >= 0, pool.shape[1]
    slots, positions = jnp.maximum(rows.slots, 0), rows.positions
    pages = table[slots, positions // page_size]
    offsets = positions % page_size
    lengths = jnp.zeros(table.shape[0], jnp.int32).at[slots].max(jnp.where(real, positions + 1, 0))
    metadata = (table, None, lengths, positions, rows.slots)
    plan = plan_paged_attention(num_heads, pool, *metadata)

    def attend(cache: PagedCache, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, PagedCache]:
        first = layer * num_pages
        own = jnp.where(real, pages + first, -1)
        cache = PagedCache(*write_pages(cache.k, cache.v, k, v, own, offsets))
        out, _ = paged_attention(q, cache.k, cache.v, *metadata, first_page=first, plan=plan)
        return out, cache

    return attend


def page_bytes(config: LlamaConfig, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def default_num_pages(config: LlamaConfig, page_size: int, dtype: DTypeLike, device: jax.Device, most: int) -> int:
    """Nine tenths of the memory that is free on an accelerator, 1 GiB on a CPU, but no more than `most` pages."""
    memory = device.memory_stats() if device.platform != "cpu" else None
    free = (1 << 30) if memory is None else int(0.9 * (memory["bytes_limit"] - memory["bytes_in_use"]))
    fit = free // page_bytes(config, page_size, dtype)
    if fit < 1:
        raise ValueError(f"num_pages: {device} has no memory left for a page of {page_size} tokens")
    return min(fit, most)
