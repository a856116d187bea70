"""FP8 row-wise weights: e4m3 values with a float32 scale for each output, and activations quantised a row at run time.

A weight is `values * scale` with one scale for each output; an activation is `values * scale` with one scale for each
token. Products are of e4m3 values, summed in float32, and both scales multiply the sum. Source: the context parallelism
paper, section 4.1 (FBGEMM's row-wise FP8). docs/fp8.md has the error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from longctx.annotations import Real
from longctx.kernels.fp8 import E4M3, RowMaximum, from_e4m3_bits, quantize_rows

# cuBLASLt multiplies FP8 in multiples of 16 only, else XLA converts the weights to wide floats.
_LEAST_ROWS = 16


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["upper_bound"])
@dataclasses.dataclass(frozen=True)
class RowQuantized:
    """The weight of a projection in FP8, or a stack of them.

    Attributes:
      values: e4m3 as uint8 bits, `[*outputs, *inputs]`.
      scale: float32 `[*outputs]`.
      upper_bound: see `quantize_rows`; None: no bound.
    """

    values: Any  # as JAX maps pytrees, a field may hold what is no array
    scale: Any
    upper_bound: Real | None = None

    def product(self, x: Array, in_axes: int, pmax: RowMaximum) -> Array:
        """x `[..., *inputs]` -> float32 `[..., *outputs]`; `pmax` as `quantize_rows` takes it."""
        quantized, row_scale = quantize_rows(x, in_axes, self.upper_bound, pmax)
        rows, matrix = _as_matrices(quantized, self.values, in_axes)
        sums = lax.platform_dependent(rows, matrix, cpu=_multiply_float32, default=_multiply_fp8)
        return _apply_scales(sums, row_scale, self.scale)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["upper_bound"])
@dataclasses.dataclass(frozen=True)
class PartlyQuantized:
    """A stack of weights of which some layers are quantised, so that all have one program.

    Stages of a pipeline run one program, and may have a quantised layer in a place where another stage has none. Values
    of both kinds are wide floats, which hold e4m3 values exactly: so a quantised layer gives the numbers of
    `RowQuantized`, from a product of wide floats.

    Attributes:
      values: wide floats `[*outputs, *inputs]`: e4m3 values in a quantised layer, else weights.
      scale: float32 `[*outputs]`; 0 in a layer that is not quantised.
      upper_bound: see `quantize_rows`; None: no bound.
    """

    values: Any  # as JAX maps pytrees, a field may hold what is no array
    scale: Any
    upper_bound: Real | None = None

    def product(self, x: Array, in_axes: int, pmax: RowMaximum) -> Array:
        """x `[..., *inputs]` -> float32 `[..., *outputs]`; `pmax` as `quantize_rows` takes it."""
        is_quantized = self.scale.reshape(-1)[0] > 0
        quantized, row_scale = quantize_rows(x, in_axes, self.upper_bound, pmax)
        x = jnp.where(is_quantized, quantized.astype(x.dtype), x)
        rows, matrix = _as_matrices(x.astype(self.values.dtype), self.values, in_axes)
        row_scale = jnp.where(is_quantized, row_scale, 1.0)
        return _apply_scales(_multiply(rows, matrix), row_scale, jnp.where(is_quantized, self.scale, 1.0))


def _as_matrices(x: Array, weight: Array, in_axes: int) -> tuple[Array, Array]:
    inputs = math.prod(weight.shape[weight.ndim - in_axes :])
    return x.reshape(-1, inputs), weight.reshape(-1, inputs)


def _apply_scales(sums: Array, row_scale: Array, scale: Array) -> Array:
    """sums `[rows, outputs]` -> `[*row_scale.shape, *scale.shape]`."""
    scaled = sums * row_scale.reshape(-1, 1) * scale.reshape(1, -1)
    return scaled.reshape(row_scale.shape + scale.shape)


def _multiply(rows: Array, matrix: Array) -> Array:
    """`[rows, inputs]` and `[outputs, inputs]` -> float32 `[rows, outputs]`."""
    # "highest" also keeps cuBLASLt from summing FP8 products with fewer bits than float32 has.
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(rows, matrix, contract, precision="highest", preferred_element_type=jnp.float32)


def _multiply_float32(rows: Array, bits: Array) -> Array:
    return _multiply(rows.astype(jnp.float32), from_e4m3_bits(bits, jnp.float32))


def _multiply_fp8(rows: Array, bits: Array) -> Array:
    count = rows.shape[0]
    if count < _LEAST_ROWS:
        rows = jnp.concatenate([rows, jnp.zeros_like(rows, shape=(_LEAST_ROWS - count, rows.shape[1]))])
    return _multiply(rows, lax.bitcast_convert_type(bits, E4M3))[:count]
