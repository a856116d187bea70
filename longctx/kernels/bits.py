"""Floats of 16 and 8 bits stored as integers: caches, and on CPUs the weights.

To update or slice a part of a bf16 array, XLA's CPU backend first converts the whole array to float32; of an integer
array it touches only the part. On a GPU the casts are free.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels.operand_dtype import operand_dtype


def bits_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which a cache of `dtype` is stored."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, dtype))


def to_bits(x: Array) -> Array:
    """The bits of a 16-bit float as uint16; wider floats unchanged."""
    return lax.bitcast_convert_type(x, bits_dtype(x.dtype))


def from_bits(x: Array, dtype: DTypeLike) -> Array:
    """Undo `to_bits` of an array of `dtype`. Floats are returned unchanged."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def widen(x: Array, dtype: DTypeLike) -> Array:
    """`from_bits(x, dtype)` in the dtype of products (`operand_dtype`). Floats are returned unchanged.

    bf16 is widened by a shift: XLA's CPU backend would fold a conversion into a bf16 product, which is slower.
    """
    if x.dtype != jnp.uint16:
        return x
    if operand_dtype(dtype) == dtype:
        return from_bits(x, dtype)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return from_bits(x, dtype).astype(jnp.float32)
