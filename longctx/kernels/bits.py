"""Caches, and for decoding on a CPU weights, of 16-bit floats are kept as their bits.

To update or slice a part of a bf16 array, XLA's CPU backend converts all of it to float32 first; of integers it
touches the part alone. On a GPU the casts are free.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def bits_dtype(dtype: DTypeLike) -> jnp.dtype:
    """What a cache of `dtype` is kept as."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if dtype.itemsize == 2 else dtype


def to_bits(x: Array) -> Array:
    """The bits of a 16-bit float as uint16; wider floats as they are."""
    return lax.bitcast_convert_type(x, bits_dtype(x.dtype))


def from_bits(x: Array, dtype: DTypeLike) -> Array:
    """Undoes `to_bits` of an array of `dtype`; what is no bits is returned as it is."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def widen(x: Array, dtype: DTypeLike) -> Array:
    """`from_bits(x, dtype)` in float32; what is no bits is returned as it is.

    From bf16 by a shift: XLA's CPU backend would make a bf16 product of a conversion, which is slower.
    """
    if x.dtype != jnp.uint16:
        return x
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return from_bits(x, dtype).astype(jnp.float32)
