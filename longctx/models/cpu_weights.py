"""`OutputMajor`: the layout of a projection that XLA's CPU backend multiplies fast."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

# With at most this many rows the weights are the first operand of a product (docs/design.md).
_FEW_ROWS = 64


@functools.partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["out_shape"])
@dataclasses.dataclass(frozen=True)
class OutputMajor:
    """The weight of a projection as a matrix `[outputs, inputs]`; `out_shape` is the shape of the outputs."""

    matrix: jax.Array
    out_shape: tuple[int, ...]

    def product(self, x: jax.Array, in_axes: int) -> jax.Array:
        """x `[..., inputs]` -> float32 `[..., *out_shape]`."""
        lead = x.shape[: x.ndim - in_axes]
        rows = x.reshape(-1, self.matrix.shape[1])
        multiply = functools.partial(lax.dot_general, precision="highest", preferred_element_type=jnp.float32)
        contract = (((1,), (1,)), ((), ()))
        if rows.shape[0] <= _FEW_ROWS:
            # The backend packs the second operand of a product in every call, so the few rows are second, not the
            # weights. Without the barrier, XLA would swap the operands again.
            y = lax.optimization_barrier(multiply(self.matrix, rows, contract)).T
        else:
            y = multiply(rows, self.matrix, contract)
        return y.reshape(*lead, *self.out_shape)
