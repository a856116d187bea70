"""e4m3 values with a float32 scale for each row: of FP8 weights and activations, and of keys and values in FP8 pages.

A row is `values * scale`. Values are stored as their bits, uint8: of an array of floats of 8 bits, XLA's CPU backend
converts the whole array to read a part of it. On a GPU the cast is free.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.annotations import Real

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of the finite e4m3 values
BITS = jnp.uint8

# A row of zeros has a scale too. FBGEMM's kernel has the same least maximum.
_LEAST_MAXIMUM = 1e-12
# A reciprocal, as XLA would turn a division by a constant into this product.
_PER_LARGEST = np.float32(1 / LARGEST)

RowMaximum = Callable[[Array], Array]
"""The maximum of an array over the devices that share a row."""


def quantize_rows(
    x: Array, axes: int = 1, upper_bound: Real | None = None, pmax: RowMaximum = lambda x: x
) -> tuple[Array, Array]:
    """Quantise each row, which is the last `axes` axes, by its largest absolute value.

    A row with NaN, or without a bound with infinity, has a scale that makes all of it NaN.

    Args:
      x: floats `[*rows, *inputs]`.
      upper_bound: the largest absolute value of a row counts as at most this; larger elements become the largest value.
      pmax: the maximum over the devices among which the row is shared.

    Returns:
      (values e4m3, of x's shape; scales float32 `[*rows]`).
    """
    wide = x.astype(jnp.float32)
    of_row = tuple(range(x.ndim - axes, x.ndim))
    largest = pmax(jnp.max(jnp.abs(wide), of_row))
    if upper_bound is not None:
        largest = jnp.minimum(largest, jnp.float32(upper_bound))
    scale = jnp.maximum(largest, jnp.float32(_LEAST_MAXIMUM)) * _PER_LARGEST
    scaled = wide / jnp.expand_dims(scale, of_row)
    return jnp.clip(scaled, -LARGEST, LARGEST).astype(E4M3), scale


def from_e4m3_bits(bits: Array, dtype: DTypeLike) -> Array:
    """Convert the bits of e4m3 values to a wider float. Floats of 16 and 32 bits have every e4m3 value."""
    return lax.bitcast_convert_type(bits, E4M3).astype(dtype)
