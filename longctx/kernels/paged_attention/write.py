"""Writes new keys and values into their pages."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import ArrayLike, Float, Float32, Int, Shaped, UInt8

from longctx.annotations import Nested
from longctx.kernels.arrays import check_array
from longctx.kernels.bits import to_bits
from longctx.kernels.fp8_rows import pack_rows, split_packed
from longctx.kernels.paged_attention.operands import check_int32_of, check_pages
from longctx.kernels.partitioning import match_varying


def write_pages(
    k_pages: Shaped[ArrayLike, "pages page_size K H"],
    v_pages: Shaped[ArrayLike, "pages page_size K Hv"],
    k: Float[ArrayLike, "T K H"],
    v: Float[ArrayLike, "T K Hv"],
    page: Int[ArrayLike, "T"] | Nested,
    offset: Int[ArrayLike, "T"] | Nested,
    k_scale: Float32[ArrayLike, "pages K page_size"] | None = None,
    v_scale: Float32[ArrayLike, "pages K page_size"] | None = None,
) -> tuple[Array, ...]:
    """Write the keys and values of some tokens to their slots.

    In place if the pages are donated or a loop carries them. With scales the pages are FP8: the row of each token and
    KV head is rounded to `e4m3 values * scale`, where the scale is its largest absolute value / 448. A row with NaN or
    infinity becomes NaN.

    Args:
      k_pages, v_pages: `[pages, page_size, K, H]` and `[pages, page_size, K, Hv]` in the dtype of k, or uint16: the
        bits of a 16-bit k.dtype. With scales float8_e4m3fn, or uint8: its bits.
      k, v: `[T, K, H]` and `[T, K, Hv]`, floating point.
      page: `[T]` integers. A row whose page is outside 0..pages-1 (padding, or another rank's) is dropped.
      offset: `[T]` integers, the slot within the page. A row whose offset is outside 0..page_size-1 is dropped. If two
        rows name one slot, either may win.
      k_scale, v_scale: float32 `[pages, K, page_size]`, both or neither.

    Returns:
      k_pages and v_pages, and if they were given, k_scale and v_scale.

    Raises:
      ValueError, TypeError: an argument has the wrong shape or dtype; the message names it.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels import write_pages
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 6, 2, 64))  # 6 tokens, 2 KV heads
      >>> empty = jnp.zeros((8, 4, 2, 64))  # a pool of 8 pages, of 4 tokens each
      >>> page, offset = jnp.array([5, 5, 5, 5, 2, 2]), jnp.arange(6) % 4
      >>> k_pages, v_pages = write_pages(empty, empty, k, v, page, offset)  # pages 5 and 2, in this order
      >>> bool((k_pages[5] == k[:4]).all()), bool((k_pages[2, :2] == k[4:]).all())
      (True, True)
      >>> padding = jnp.full(6, -1)
      >>> k_pages, _ = write_pages(empty, empty, k, v, padding, offset)
      >>> bool((k_pages == empty).all())  # rows without a page are dropped
      True
    """
    k, v = check_array("k", k), check_array("v", v)
    given = check_array("k_pages", k_pages).dtype
    k_pages, v_pages, *scales = check_pages(k_pages, v_pages, k_scale, v_scale, k.dtype, "k")
    for name, x, pool in (("k", k, k_pages), ("v", v, v_pages)):
        if x.ndim != 3 or x.shape[1:] != pool.shape[2:] or x.shape[0] != k.shape[0]:
            raise ValueError(f"{name} must have the shape [T, K, H], T of k, of pages {pool.shape}, got {x.shape}")
        if x.dtype != k.dtype:
            raise TypeError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    page, offset = (
        jnp.asarray(check_int32_of(name, x, k.shape[:1])) for name, x in (("page", page), ("offset", offset))
    )
    k_scale, v_scale = scales
    if k_scale is not None and v_scale is not None:
        if not jnp.issubdtype(k.dtype, jnp.floating) or k.dtype.itemsize < 2:
            raise TypeError(f"k must be floating point of 16 bits or more, got {k.dtype}")
        pages = (k_pages, v_pages, k_scale, v_scale)
        k_pages, v_pages, k_scale, v_scale = write_packed(pages, pack_rows(k), pack_rows(v), page, offset)
        return *(lax.bitcast_convert_type(x, given) for x in (k_pages, v_pages)), k_scale, v_scale
    k_pages, v_pages, k, v, page, offset = match_varying((k_pages, v_pages, k, v, page, offset))
    page = _dropped_out_of_bounds(page, offset, k_pages)
    if page.shape == (1,):
        # XLA makes a dynamic-update-slice of the write of one row, fuses it into each of several readers, such as
        # attention to a table of one page, and then copies all pages. It keeps a scatter of two rows.
        k, v, page, offset = (jnp.concatenate([x, x]) for x in (k, v, page, offset))

    def write(pages: Array, rows: Array) -> Array:
        return pages.at[page, offset].set(to_bits(rows) if pages.dtype == jnp.uint16 else rows, mode="drop")

    return write(k_pages, k), write(v_pages, v)


def write_packed(
    pages: tuple[Array, Array, Array, Array],
    k: UInt8[Array, "T K H_4"],
    v: UInt8[Array, "T K H_4"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> tuple[Array, Array, Array, Array]:
    """Write packed rows (`fp8_rows`) to FP8 pages, as `write_pages`.

    Args:
      pages: k_pages and v_pages, uint8, and k_scale and v_scale.

    Returns:
      The same four.
    """
    pages, k, v, page, offset = match_varying((pages, k, v, page, offset))
    k_pages, v_pages, k_scale, v_scale = pages
    page = _dropped_out_of_bounds(page, offset, k_pages)
    (k_bits, k_new), (v_bits, v_new) = split_packed(k), split_packed(v)
    return (
        k_pages.at[page, offset].set(k_bits, mode="drop"),
        v_pages.at[page, offset].set(v_bits, mode="drop"),
        k_scale.at[page, :, offset].set(k_new, mode="drop"),
        v_scale.at[page, :, offset].set(v_new, mode="drop"),
    )


def _dropped_out_of_bounds(page: Array, offset: Array, k_pages: Array) -> Array:
    """Pages, beyond the end where they or offsets are negative: `mode="drop"` drops these, and would wrap those."""
    return jnp.where((page < 0) | (offset < 0), k_pages.shape[0], page)
