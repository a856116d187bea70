"""A projection as XLA's CPU backend reads it fast: `OutputMajor`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

# Up to so many rows the weights go first in a product (docs/design.md).
_FEW_ROWS = 64


@functools.partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["out_shape"])
@dataclasses.dataclass(frozen=True)
class OutputMajor:
    """A projection's weight as a matrix `[outputs, inputs]`; `out_shape` is what the outputs are seen as."""

    matrix: jax.Array
    out_shape: tuple[int, ...]

    def product(self, x: jax.Array, in_axes: int) -> jax.Array:
        """x `[..., inputs]` -> float32 `[..., *out_shape]`."""
        lead = x.shape[: x.ndim - in_axes]
        rows = x.reshape(-1, self.matrix.shape[1])
        multiply = functools.partial(lax.dot_general, precision="highest", preferred_element_type=jnp.float32)
        contract = (((1,), (1,)), ((), ()))
        if rows.shape[0] <= _FEW_ROWS:
            # The backend packs the second operand of a product anew each time: that had better be the few rows, not
            # the weights. Without the barrier, XLA would turn the product round again.
            y = lax.optimization_barrier(multiply(self.matrix, rows, contract)).T
        else:
            y = multiply(rows, self.matrix, contract)
        return y.reshape(*lead, *self.out_shape)
