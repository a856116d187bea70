"""The paged cache on devices, and how much of it there is room for."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from longctx.kernels.bits import bits_dtype
from longctx.models import LlamaConfig


class PagedCache(NamedTuple):
    """Keys and values `[layers * pages, page_size, K, H]`, 16-bit floats as their bits.

    Layer i has pages `i * pages` and on. As one pool, nothing of it is ever sliced out: XLA's CPU backend would copy
    the whole of it for that. Over a mesh, every stage has the pages of its layers, and every rank its own, one behind
    the other.
    """

    k: Array
    v: Array

    @classmethod
    def empty(
        cls,
        config: LlamaConfig,
        num_pages: int,
        page_size: int,
        dtype: DTypeLike,
        device: Any = None,
        num_ranks: int = 1,
    ) -> Self:
        """Zeros, on a device or in a sharding; `num_pages` on each of `num_ranks`."""
        shape = (config.num_layers * num_ranks * num_pages, page_size, config.num_kv_heads, config.head_dim)
        k, v = (jnp.zeros(shape, bits_dtype(dtype), device=device) for _ in range(2))
        return cls(k, v)


def page_bytes(width: int, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of one page, keys and values, of so many numbers a token: layers * KV heads * head size of a device."""
    return 2 * width * page_size * jnp.dtype(dtype).itemsize


def default_num_pages(
    width: int, page_size: int, dtype: DTypeLike, device: jax.Device, most: int, besides: int = 0
) -> int:
    """Nine tenths of the memory that is free on an accelerator, 1 GiB on a CPU, but no more than `most` pages.

    `besides`: bytes that are yet to be placed there.
    """
    memory = device.memory_stats() if device.platform != "cpu" else None
    free = (1 << 30) if memory is None else int(0.9 * (memory["bytes_limit"] - memory["bytes_in_use"] - besides))
    fit = free // page_bytes(width, page_size, dtype)
    if fit < 1:
        raise ValueError(f"num_pages: {device} has no memory left for a page of {page_size} tokens")
    return min(fit, most)
