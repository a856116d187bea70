"""Writes new keys and values into their pages."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import ArrayLike, Float, Int, Shaped

from longctx.kernels.arrays import check_array
from longctx.kernels.attention.operands import match_varying
from longctx.kernels.bits import to_bits
from longctx.kernels.paged_attention.operands import check_int32_of, check_pages


def write_pages(
    k_pages: Shaped[ArrayLike, "pages page_size K H"],
    v_pages: Shaped[ArrayLike, "pages page_size K H"],
    k: Float[ArrayLike, "T K H"],
    v: Float[ArrayLike, "T K H"],
    page: Int[ArrayLike, "T"],
    offset: Int[ArrayLike, "T"],
) -> tuple[Shaped[Array, "pages page_size K H"], Shaped[Array, "pages page_size K H"]]:
    """Write the keys and values of some tokens to their slots, in place if the pages are donated or a loop carries
    them.

    Args:
      k_pages, v_pages: `[pages, page_size, K, H]` in the dtype of k, or uint16: the bits of a 16-bit k.dtype.
      k, v: `[T, K, H]`, floating point.
      page: `[T]` integers. A row whose page is outside 0..pages-1 (padding, or another rank's) is dropped.
      offset: `[T]` integers, the slot within the page, 0..page_size-1. If two rows name one slot, either may win.

    Returns:
      k_pages and v_pages.

    Raises:
      ValueError, TypeError: an argument has the wrong shape or dtype; the message names it.
    """
    k, v = check_array("k", k), check_array("v", v)
    k_pages, v_pages = check_pages(k_pages, v_pages, k.dtype, "k")
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 3 or x.shape[1:] != k_pages.shape[2:] or x.shape != k.shape:
            raise ValueError(f"{name} must have the shape [T, K, H] of k and of pages {k_pages.shape}, got {x.shape}")
        if x.dtype != k.dtype:
            raise TypeError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    page, offset = (
        jnp.asarray(check_int32_of(name, x, k.shape[:1])) for name, x in (("page", page), ("offset", offset))
    )
    k_pages, v_pages, k, v, page, offset = match_varying((k_pages, v_pages, k, v, page, offset))
    page = jnp.where(page < 0, k_pages.shape[0], page)  # beyond the end, where mode="drop" drops it

    def write(pages: Array, rows: Array) -> Array:
        return pages.at[page, offset].set(to_bits(rows) if pages.dtype == jnp.uint16 else rows, mode="drop")

    return write(k_pages, k), write(v_pages, v)
