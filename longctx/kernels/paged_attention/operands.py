"""Checks the arguments of paged attention and brings them to one form."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax
from jax.experimental import checkify
from jax.typing import ArrayLike

from longctx.annotations import Nested
from longctx.kernels.arrays import check_array, check_int32
from longctx.kernels.bits import from_bits
from longctx.kernels.fp8 import BITS, E4M3
from longctx.kernels.fp8_rows import dequantize_rows


class PagedOperands(NamedTuple):
    """q `[T, N, H]`, pages `[pages, page_size, K, H or Hv]`; metadata int32, as `paged_attention` describes them.

    FP8 pages are uint8, and their scales `[pages, K, page_size]` float32; None: the pages are not FP8.
    """

    q: Array
    k_pages: Array
    v_pages: Array
    page_table: Array  # [B, M]
    page_index: Array | None  # [B, M], None: entry m is page number m
    kv_lengths: Array  # [B]
    q_positions: Array  # [T]
    q_sequence: Array  # [T], negative: padding
    first_page: Array  # []
    k_scale: Array | None = None
    v_scale: Array | None = None
    q_first: Array | None = None  # [T]

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """The shape `[T, N, Hv]` of results."""
        return self.q.shape[0], self.q.shape[1], self.v_pages.shape[3]

    def first_seen(self, before: int | None) -> Array | None:
        """Return the first position, 0 or more, that each row sees `[T]`; None: all see those from 0 on.

        A row sees no key more than `before` tokens before it; None: any.
        """
        first = None if self.q_first is None else jnp.maximum(self.q_first, 0)
        if before is None:
            return first
        of_window = jnp.maximum(jnp.maximum(self.q_positions, 0) - before, 0)
        return of_window if first is None else jnp.maximum(of_window, first)


def check_paged_operands(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: ArrayLike | Nested,
    page_index: ArrayLike | Nested | None,
    kv_lengths: ArrayLike | Nested,
    q_positions: ArrayLike | Nested,
    q_sequence: ArrayLike | Nested,
    first_page: ArrayLike,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    q_first: ArrayLike | Nested | None = None,
) -> PagedOperands:
    """Check all arguments of `paged_attention`. Metadata of NumPy stay NumPy's.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.
    """
    q = _check_shape("q", q, "[T, N, H]")
    if not jnp.issubdtype(q.dtype, jnp.floating) or q.dtype.itemsize < 2:
        raise TypeError(f"q must be floating point of 16 bits or more, got {q.dtype}")
    k_pages, v_pages, k_scale, v_scale = check_pages(k_pages, v_pages, k_scale, v_scale, q.dtype, "q")
    heads, kv_heads = q.shape[1], k_pages.shape[2]
    if q.shape[2] != k_pages.shape[3]:
        raise ValueError(f"k_pages must have the head size of q, {q.shape[2]}, got {k_pages.shape[3]}")
    if heads == 0 or heads % kv_heads:
        raise ValueError(f"q must have a multiple of k_pages' heads: {q.shape} and {k_pages.shape}")
    metadata = check_metadata(page_table, page_index, kv_lengths, q_positions, q_sequence, q.shape[0])
    first, scales = check_int32_of("first_page", first_page, ()), (k_scale, v_scale)
    return PagedOperands(q, k_pages, v_pages, *metadata, first, *scales, check_q_first(q_first, q.shape[0]))


def check_q_first(q_first: ArrayLike | Nested | None, num_rows: int) -> Any:
    """Check the first positions that rows see, and convert them to int32."""
    return None if q_first is None else check_int32_of("q_first", q_first, (num_rows,))


def check_metadata(
    page_table: ArrayLike | Nested,
    page_index: ArrayLike | Nested | None,
    kv_lengths: ArrayLike | Nested,
    q_positions: ArrayLike | Nested,
    q_sequence: ArrayLike | Nested,
    num_rows: int,
) -> tuple[Any, Any, Any, Any, Any]:
    """Check the metadata and convert it to int32, in this order."""
    table = check_int32("page_table", page_table)
    if table.ndim != 2:
        raise ValueError(f"page_table must have a shape [B, M], got {table.shape}")
    return (
        table,
        None if page_index is None else check_int32_of("page_index", page_index, table.shape),
        check_int32_of("kv_lengths", kv_lengths, table.shape[:1]),
        check_int32_of("q_positions", q_positions, (num_rows,)),
        check_int32_of("q_sequence", q_sequence, (num_rows,)),
    )


def check_pages(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    k_scale: ArrayLike | None,
    v_scale: ArrayLike | None,
    dtype: jnp.dtype,
    of: str,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Check pages, and scales where there are any.

    Args:
      k_pages, v_pages: `[pages, page_size, K, H]` and `[pages, page_size, K, Hv]` of `dtype` (that of the argument
        named `of`) or of its bits; with scales, of float8_e4m3fn or its bits.
      k_scale, v_scale: float32 `[pages, K, page_size]`, or None.

    Returns:
      Pages and scales; FP8 pages as uint8.
    """
    shape = "[pages, page_size, K, H]"
    k_pages, v_pages = _check_shape("k_pages", k_pages, shape), _check_shape("v_pages", v_pages, shape)
    is_fp8 = k_scale is not None or v_scale is not None
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_page_dtype(name, x.dtype, dtype, of, is_fp8)
    if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"k_pages and v_pages must have one shape, but for the head size, and one dtype, got {k_pages.shape} of "
            f"{k_pages.dtype} and {v_pages.shape} of {v_pages.dtype}"
        )
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if 0 in x.shape[1:]:
            raise ValueError(f"{name} must have a page size, heads and a head size over 0, got {x.shape}")
    if not is_fp8:
        return k_pages, v_pages, None, None
    scales = (_check_scale(name, x, k_pages.shape) for name, x in (("k_scale", k_scale), ("v_scale", v_scale)))
    return _bits(k_pages), _bits(v_pages), *scales  # type: ignore[return-value]


def _check_page_dtype(name: str, found: jnp.dtype, dtype: jnp.dtype, of: str, is_fp8: bool) -> None:
    if is_fp8:
        if found not in (BITS, E4M3):
            raise TypeError(f"{name} must be float8_e4m3fn, or uint8, its bits, where scales are given; got {found}")
    elif found in (BITS, E4M3):
        raise TypeError(f"{name} of {found} needs k_scale and v_scale")
    elif found != dtype and not (found == jnp.uint16 and dtype.itemsize == 2):
        bits = " or uint16, its bits" if dtype.itemsize == 2 else ""
        raise TypeError(f"{name} must have the dtype of {of}, {dtype}{bits}; got {found}")


def _check_scale(name: str, x: ArrayLike | None, pages: tuple[int, ...]) -> Array:
    if x is None:
        raise ValueError(f"{name} must be given where the other scale is: FP8 pages have both")
    x, (num_pages, page_size, kv_heads, _) = check_array(name, x), pages
    if x.shape != (num_pages, kv_heads, page_size):
        raise ValueError(
            f"{name} must have the shape [pages, K, page_size] of pages {pages}, {(num_pages, kv_heads, page_size)}, "
            f"got {x.shape}"
        )
    if x.dtype != jnp.float32:
        raise TypeError(f"{name} must be float32, got {x.dtype}")
    return x


def _bits(x: Array) -> Array:
    return x if x.dtype == BITS else lax.bitcast_convert_type(x, BITS)


def _check_shape(name: str, x: ArrayLike, shape: str) -> Array:
    x = check_array(name, x)
    if x.ndim != shape.count(",") + 1:
        raise ValueError(f"{name} must have a shape {shape}, got {x.shape}")
    return x


def check_int32_of(name: str, x: ArrayLike | Nested, shape: tuple[int, ...]) -> Any:
    """`check_int32`, and the shape."""
    checked = check_int32(name, x)
    if checked.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {checked.shape}")
    return checked


def slots(operands: PagedOperands) -> tuple[Array, Array]:
    """Positions of the slots of all entries `[B, M, page_size]`, 0 where no token is written, and whether one is."""
    table, index, page_size = operands.page_table, operands.page_index, operands.k_pages.shape[1]
    if index is None:
        index = jnp.broadcast_to(jnp.arange(table.shape[1], dtype=jnp.int32), table.shape)
    index = jnp.minimum(index, (2**31 - 1) // page_size - 1)  # the index of an unused entry must not overflow
    positions = rearrange(index, "b m -> b m 1") * page_size + rearrange(
        jnp.arange(page_size, dtype=jnp.int32), "p -> 1 1 p"
    )
    written = positions < operands.kv_lengths[:, None, None]
    return jnp.where(written, positions, 0), written


def gather_slots(operands: PagedOperands, pages: Array, scale: Array | None, written: Array, dtype: Any) -> Array:
    """Keys or values of all slots `[B, M, page_size, K, H]`. Slots never written may hold NaN, and give 0."""
    page = operands.first_page + operands.page_table
    if scale is None:
        rows = from_bits(pages[page], operands.q.dtype)
    else:
        rows = dequantize_rows(pages[page], rearrange(scale[page], "b m k p -> b m p k"), operands.q.dtype)
    return jnp.where(written[..., None, None], rows.astype(dtype), 0)


def debug_check_table(operands: PagedOperands) -> None:
    """Under `checkify`, raise an error for entries in use that are outside the pool; otherwise this costs nothing."""
    k_pages, table = operands.k_pages, operands.page_table
    number = jnp.arange(table.shape[1], dtype=jnp.int32)[None] if operands.page_index is None else operands.page_index
    in_use = number < (operands.kv_lengths[:, None] + k_pages.shape[1] - 1) // k_pages.shape[1]
    page = operands.first_page + table
    wrong = in_use & ((page < 0) | (page >= k_pages.shape[0]))
    checkify.debug_check(
        ~jnp.any(wrong),
        "page_table must hold pages below {pages} (with first_page added) where entries are in use, got {found}",
        pages=jnp.int32(k_pages.shape[0]),
        found=page.ravel()[jnp.argmax(wrong)],
    )
