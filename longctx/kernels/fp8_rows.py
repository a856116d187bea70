"""Keys and values in FP8: each token's row of a KV head has e4m3 values and a scale of its own.

A row is quantised once, where it is made. Pages keep values and scales apart; wherever else rows go, each is one packed
row: H bytes of values and then the 4 bytes of its float32 scale. What a row is worth, `dequantize_rows`, does not
depend on the way that it came.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, UInt8

from longctx.kernels.fp8 import BITS, from_e4m3_bits, quantize_rows
from longctx.kernels.operand_dtype import wide_dtype

SCALE_BYTES = 4


def dequantize_rows(
    bits: UInt8[Array, "*rows H"], scale: Float32[Array, "*rows"], dtype: DTypeLike
) -> Float[Array, "*rows H"]:
    """`values * scale` in float32 (in float64 for float64), rounded to `dtype`, whose subnormals are 0."""
    wide = wide_dtype(dtype)
    rows = from_e4m3_bits(bits, wide) * scale[..., None].astype(wide)
    if jnp.dtype(dtype) == wide:
        return rows
    # XLA may drop a conversion there and back (`xla_allow_excess_precision`), but not this rounding.
    info = jnp.finfo(dtype)
    return lax.reduce_precision(rows, info.nexp, info.nmant).astype(dtype)


def pack_rows(x: Float[Array, "*rows H"]) -> UInt8[Array, "*rows H_4"]:
    """Quantise rows. One with NaN or infinity becomes NaN."""
    values, scale = quantize_rows(x)
    return join_packed(lax.bitcast_convert_type(values, BITS), scale)


def split_packed(packed: UInt8[Array, "*rows H_4"]) -> tuple[UInt8[Array, "*rows H"], Float32[Array, "*rows"]]:
    """The bits of packed rows, and their scales."""
    head_size = packed.shape[-1] - SCALE_BYTES
    return packed[..., :head_size], lax.bitcast_convert_type(packed[..., head_size:], jnp.float32)


def join_packed(bits: UInt8[Array, "*rows H"], scale: Float32[Array, "*rows"]) -> UInt8[Array, "*rows H_4"]:
    """Undo `split_packed`."""
    return jnp.concatenate([bits, lax.bitcast_convert_type(scale, BITS)], -1)


def unpack_rows(packed: UInt8[Array, "*rows H_4"], dtype: DTypeLike) -> Float[Array, "*rows H"]:
    """Return the values of packed rows, in `dtype`."""
    return dequantize_rows(*split_packed(packed), dtype)
