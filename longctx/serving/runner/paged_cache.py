"""The paged cache on devices, and how many pages fit into their memory."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Shaped

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


def page_bytes(width: int, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of the keys and values of one page on a device; `width` is its layers * KV heads * head size."""
    return 2 * width * page_size * jnp.dtype(dtype).itemsize


def default_num_pages(
    width: int, page_size: int, dtype: DTypeLike, device: jax.Device, max_pages: int, reserved_bytes: int = 0
) -> int:
    """How many pages fit into 1 GiB on a CPU, or nine tenths of an accelerator's free memory; at most `max_pages`.

    Args:
      width, page_size, dtype: as in `page_bytes`.
      reserved_bytes: memory that is free now, and that arrays still to be placed will take.

    Raises:
      ValueError: not one page fits.
    """
    memory = device.memory_stats() if device.platform != "cpu" else None
    free = (1 << 30) if memory is None else int(0.9 * (memory["bytes_limit"] - memory["bytes_in_use"] - reserved_bytes))
    fit = free // page_bytes(width, page_size, dtype)
    if fit < 1:
        raise ValueError(f"num_pages: {device} has no memory left for a page of {page_size} tokens")
    return min(fit, max_pages)
