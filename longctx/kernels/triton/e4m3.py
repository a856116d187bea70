"""Dequantises FP8 keys and values inside a Triton kernel, by integer arithmetic: only GPUs from sm_89 on convert.

A kernel loads pairs of e4m3 values as one 16-bit word, and multiplies even and odd columns apart. So no array of bits
is larger than 2^31 elements where Pallas computes its addresses in 32 bits, and nothing has to be interleaved.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def dequantize_pairs(words: Array, scale: Array, dtype: Any) -> tuple[Array, Array]:
    """`values * scale` of the low and of the high byte of words, as `fp8_rows.dequantize_rows`.

    Args:
      words: uint16 `[R, columns]`.
      scale: float32 `[R, 1]`.
      dtype: that the products are rounded to.
    """
    return _dequantize(words & jnp.uint16(0xFF), scale, dtype), _dequantize(words >> jnp.uint16(8), scale, dtype)


def _dequantize(bits: Array, scale: Array, dtype: Any) -> Array:
    magnitude = bits & jnp.uint16(0x7F)
    # With its exponent in the place of that of a float16 a value is 2^-8 of itself, also where it is subnormal.
    half = lax.bitcast_convert_type(
        magnitude << jnp.uint16(7) | (bits & jnp.uint16(0x80)) << jnp.uint16(8), jnp.float16
    )
    values = jnp.where(magnitude == jnp.uint16(0x7F), jnp.nan, half.astype(jnp.float32) * 256.0)
    rows = values * scale
    if jnp.dtype(dtype) == jnp.float32:
        return rows
    # Subnormal results are 0.
    return jnp.where(jnp.abs(rows) < float(jnp.finfo(dtype).tiny), 0.0, rows).astype(dtype)
