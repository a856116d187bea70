"""Rotary position embedding with angles exact at any position below 2^31.

A float32 product `position * frequency` is off by 0.3 radians at position 10M, and traced code has no float64. But only
the fraction of a turn matters, and unsigned integers drop whole turns when they overflow. So each frequency is stored
as turns per token in 64-bit fixed point, and `position * frequency mod 1` takes three wrapping uint32 products. The
only error left is that of float32 in the cosine itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from longctx.annotations import Real
from longctx.models.rope_config import RopeConfig

# 2 pi to 60 digits: float64 would limit the fixed point to 53 bits.
_TWO_PI = Fraction("6.28318530717958647692528676655900576839433879875021164194989")


@dataclass(frozen=True)
class RopeTable:
    """Turns per token, `(hi + lo / 2^32) / 2^32`: `hi` and `lo` are uint32 `[head_dim // 2]`."""

    hi: np.ndarray
    lo: np.ndarray
    attention_factor: Real


def rope_table(rope: RopeConfig, head_dim: int) -> RopeTable:
    """The frequencies of `rope` in fixed point, computed on the host."""
    frequencies = rope.inverse_frequencies(head_dim)
    turns = [round(Fraction(float(frequency)) / _TWO_PI * 2**64) for frequency in frequencies]
    hi = np.array([(turn >> 32) & 0xFFFFFFFF for turn in turns], np.uint32)
    lo = np.array([turn & 0xFFFFFFFF for turn in turns], np.uint32)
    return RopeTable(hi, lo, rope.attention_factor)


class Rope(NamedTuple):
    """Cosines and sines of the rows' positions, float32 `[*B, T, H / 2]`.

    Attributes:
      cos, sin: of all layers, or of those without the window.
      local_cos, local_sin: of sliding layers; None: they have the others.
    """

    cos: Array
    sin: Array
    local_cos: Array | None = None
    local_sin: Array | None = None

    def of_layer(self, is_sliding: Bool[ArrayLike, ""] | None) -> tuple[Array, Array]:
        """The cosines and sines of a layer."""
        if self.local_cos is None or self.local_sin is None or is_sliding is None:
            return self.cos, self.sin
        return jnp.where(is_sliding, self.local_cos, self.cos), jnp.where(is_sliding, self.local_sin, self.sin)


def rope_cos_sin(
    table: RopeTable, positions: Int[Array, "*B T"]
) -> tuple[Float[Array, "*B T half"], Float[Array, "*B T half"]]:
    """Cosines and sines, float32 `[*B, T, head_dim // 2]`, of `positions` (integers `[*B, T]`, >= 0)."""
    position = positions.astype(jnp.uint32)[..., None]
    frequency_shape = (1,) * positions.ndim + (-1,)
    hi, lo = table.hi.reshape(frequency_shape), table.lo.reshape(frequency_shape)
    phase = position * hi + _high_product(position, lo)
    # As a signed number the phase is in [-1/2, 1/2) of a turn, where float32 is most precise.
    angle = lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    factor = np.float32(table.attention_factor)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def _high_product(a: Array, b: np.ndarray) -> Array:
    """The upper 32 bits of the 64-bit product of uint32 numbers, at most 2 too small."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    return a_high * b_high + ((a_high * b_low) >> 16) + ((a_low * b_high) >> 16)


def apply_rope(
    x: Float[Array, "*B T heads H"], cos: Float[Array, "*B T half"], sin: Float[Array, "*B T half"]
) -> Float[Array, "*B T heads H"]:
    """Rotate `x` in float32 by angles `[*B, T, H / 2]`: dimension i pairs with i + H / 2, Hugging Face's order."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
