"""Weights of projections in the forms that products take: FP8 row-wise, and output-major for CPUs.

Row-wise FP8: a weight is e4m3 values times a float32 scale for each output, an activation is e4m3 values times a scale
for each token. Products of e4m3 values are summed in float32, and both scales multiply the sum. Source: the context
parallelism paper, section 4.1 (FBGEMM's row-wise FP8). docs/fp8.md has the error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.annotations import Real
from longctx.kernels.bits import widen
from longctx.kernels.fp8 import E4M3, RowMaximum, from_e4m3_bits, quantize_rows
from longctx.kernels.operand_dtype import operand_dtype
from longctx.kernels.partitioning import match_varying

# cuBLASLt multiplies FP8 in multiples of 16 only, else XLA converts the weights to wide floats.
_LEAST_ROWS = 16
# With at most this many rows the weights are the first operand of a product (docs/design.md).
_FEW_ROWS = 64
_BLOCK_BYTES = 1 << 18  # of widened weights, which stay in a core's cache


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
        """Multiply x `[..., *inputs]` -> float32 `[..., *outputs]`; `pmax` as `quantize_rows` takes it."""
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
        """Multiply x `[..., *inputs]` -> float32 `[..., *outputs]`; `pmax` as `quantize_rows` takes it."""
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
    """Scale sums `[rows, outputs]` -> `[*row_scale.shape, *scale.shape]`."""
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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["out_shapes"])
@dataclasses.dataclass(frozen=True)
class OutputMajor:
    """The weights of one or more projections of the same input as a matrix `[outputs, inputs]`.

    Attributes:
      matrix: floats, or the bits of 16-bit floats of the inputs' dtype.
      out_shapes: the shapes of the projections' outputs on a device.
    """

    matrix: Array
    out_shapes: tuple[tuple[int, ...], ...]

    def product(self, x: Array, in_axes: int = 1) -> list[Array]:
        """Multiply x `[..., inputs]`, the inputs in its last `in_axes` axes -> float32 `[..., *out_shape]` of each."""
        lead = x.shape[: x.ndim - in_axes]
        rows = x.reshape(-1, self.matrix.shape[1])
        multiply = _multiply_few if rows.shape[0] <= _FEW_ROWS else _multiply_many
        y = multiply(rows, self.matrix)
        ends = np.cumsum([math.prod(shape) for shape in self.out_shapes])
        parts = jnp.split(y, ends[:-1], axis=1)
        return [part.reshape(*lead, *shape) for part, shape in zip(parts, self.out_shapes, strict=True)]


def _multiply_many(rows: Array, matrix: Array) -> Array:
    matrix = widen(matrix, rows.dtype)
    return _multiply(rows.astype(matrix.dtype), matrix)


def _multiply_few(rows: Array, matrix: Array) -> Array:
    """The same for few rows.

    XLA's CPU backend packs the second operand of a product in every call, so the few rows are second, not the weights.
    Bits are widened block by block: a whole widened matrix would go to memory and back.
    """
    outputs, inputs = matrix.shape
    block = max(1, _BLOCK_BYTES // (4 * inputs))
    if matrix.dtype != jnp.uint16 or operand_dtype(rows.dtype).itemsize == 2 or outputs <= block:
        matrix = widen(matrix, rows.dtype)
        # Without the barrier, XLA would swap the operands again.
        return lax.optimization_barrier(_multiply(matrix, rows.astype(matrix.dtype))).T

    def compute_block(number: Array, y: Array) -> Array:
        start = jnp.minimum(number * block, outputs - block)  # the last block computes some outputs again
        part = widen(lax.dynamic_slice_in_dim(matrix, start, block), rows.dtype)
        return lax.dynamic_update_slice_in_dim(y, _multiply(part, wide), start, 0)

    wide = rows.astype(jnp.float32)
    y, wide, matrix = match_varying((jnp.zeros((outputs, rows.shape[0])), wide, matrix))
    return lax.fori_loop(0, -(-outputs // block), compute_block, y).T


def project_together(
    x: Array, weights: Mapping[str, Any], names: tuple[str, ...], biases: tuple[str, ...] = ()
) -> tuple[Array, ...]:
    """`project` by each of some weights of a layer, which may be fused into one (`OutputMajor`)."""
    fused = weights.get(" ".join(names))
    products = fused.product(x) if fused is not None else [project(x, weights[n], dtype=jnp.float32) for n in names]
    given = [weights.get(name) for name in biases] or [None] * len(names)
    return tuple(add_bias(y, bias).astype(x.dtype) for y, bias in zip(products, given, strict=True))


def project(
    x: Array,
    weight: Array | OutputMajor | RowQuantized | PartlyQuantized,
    axes: int = 1,
    dtype: DTypeLike | None = None,
    pmax: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """Contract the last `axes` axes of `x` with the first of `weight`, summing in float32; `dtype` None is that of x.

    A quantised weight quantises `x` too, whose rows have their maximum over devices by `pmax`.
    """
    if isinstance(weight, OutputMajor):
        (y,) = weight.product(x, axes)
    elif isinstance(weight, RowQuantized | PartlyQuantized):
        y = weight.product(x, axes, pmax)
    else:
        # By default a GPU would multiply float32 in TF32. "highest" does not slow down products of 16-bit floats.
        y = jnp.tensordot(
            x.astype(weight.dtype), weight, axes=axes, precision="highest", preferred_element_type=jnp.float32
        )
    return y.astype(x.dtype if dtype is None else dtype)


def add_bias(y: Array, bias: Array | None) -> Array:
    """Add a bias of the last axes, if there is one, in float32."""
    return y if bias is None else y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
