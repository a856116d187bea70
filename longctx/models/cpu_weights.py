"""`OutputMajor`: the layout of projections that XLA's CPU backend multiplies fast."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longctx.kernels.bits import widen
from longctx.kernels.operand_dtype import operand_dtype
from longctx.kernels.partitioning import match_varying

# With at most this many rows the weights are the first operand of a product (docs/design.md).
_FEW_ROWS = 64
_BLOCK_BYTES = 1 << 18  # of widened weights, which stay in a core's cache


@functools.partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["out_shapes"])
@dataclasses.dataclass(frozen=True)
class OutputMajor:
    """The weights of one or more projections of the same input as a matrix `[outputs, inputs]`.

    Attributes:
      matrix: floats, or the bits of 16-bit floats of the inputs' dtype.
      out_shapes: the shapes of the projections' outputs on a device.
    """

    matrix: jax.Array
    out_shapes: tuple[tuple[int, ...], ...]

    def product(self, x: jax.Array, in_axes: int = 1) -> list[jax.Array]:
        """x `[..., inputs]`, the inputs in its last `in_axes` axes -> float32 `[..., *out_shape]` of each."""
        lead = x.shape[: x.ndim - in_axes]
        rows = x.reshape(-1, self.matrix.shape[1])
        multiply = _multiply_few if rows.shape[0] <= _FEW_ROWS else _multiply_many
        y = multiply(rows, self.matrix)
        ends = np.cumsum([math.prod(shape) for shape in self.out_shapes])
        parts = jnp.split(y, ends[:-1], axis=1)
        return [part.reshape(*lead, *shape) for part, shape in zip(parts, self.out_shapes, strict=True)]


def _multiply_many(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """`[rows, inputs]` and `[outputs, inputs]` -> float32 `[rows, outputs]`."""
    matrix = widen(matrix, rows.dtype)
    return _dot(rows.astype(matrix.dtype), matrix)


def _multiply_few(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """The same for few rows.

    XLA's CPU backend packs the second operand of a product in every call, so the few rows are second, not the weights.
    Bits are widened block by block: a whole widened matrix would go to memory and back.
    """
    outputs, inputs = matrix.shape
    block = max(1, _BLOCK_BYTES // (4 * inputs))
    if matrix.dtype != jnp.uint16 or operand_dtype(rows.dtype).itemsize == 2 or outputs <= block:
        matrix = widen(matrix, rows.dtype)
        # Without the barrier, XLA would swap the operands again.
        return lax.optimization_barrier(_dot(matrix, rows.astype(matrix.dtype))).T

    def compute_block(number: jax.Array, y: jax.Array) -> jax.Array:
        start = jnp.minimum(number * block, outputs - block)  # the last block computes some outputs again
        part = widen(lax.dynamic_slice_in_dim(matrix, start, block), rows.dtype)
        return lax.dynamic_update_slice_in_dim(y, _dot(part, wide), start, 0)

    wide = rows.astype(jnp.float32)
    y, wide, matrix = match_varying((jnp.zeros((outputs, rows.shape[0])), wide, matrix))
    return lax.fori_loop(0, -(-outputs // block), compute_block, y).T


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Contract the last axes of two matrices, summing in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=jnp.float32)
