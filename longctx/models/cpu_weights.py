"""Parameters as XLA's CPU backend reads them fast; the same model computes the same from them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longctx.models.params import Params

# Up to so many rows the weights go first in a product (docs/design.md).
_FEW_ROWS = 64


@functools.partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["out_shape"])
@dataclasses.dataclass(frozen=True)
class OutputMajor:
    """A projection's weight as a matrix `[outputs, inputs]`; `out_shape` is what the outputs are seen as."""

    matrix: jax.Array
    out_shape: tuple[int, ...]

    @classmethod
    def of(cls, weight: np.ndarray, device: jax.Device, in_axes: int = 1) -> OutputMajor:
        """Of a weight whose first `in_axes` axes are contracted: a copy, on a device."""
        out_shape = weight.shape[in_axes:]
        matrix = weight.reshape(-1, int(np.prod(out_shape))).T
        return cls(jax.device_put(np.ascontiguousarray(matrix), device), out_shape)

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


def arrange_for_cpu(params: Params) -> Params:
    """On a CPU, the same parameters in another arrangement; elsewhere as they are.

    In float32 `layers` becomes a tuple, one pytree a layer, since weights sliced out of a stack inside a program are
    copied before each product; and the projections become `OutputMajor`, which takes memory of its own. Slicing a
    stack of 16-bit floats converts all layers each time: those stacks become their bits (`kernels.bits`), as views.
    """
    leaf = params["embed"]
    on_cpu = isinstance(leaf, jax.Array) and [device.platform for device in leaf.devices()] == ["cpu"]
    if not on_cpu or any(stack.dtype != leaf.dtype for stack in params["layers"].values()):
        return params
    device = next(iter(leaf.devices()))
    view = functools.partial(jax.device_put, device=device, may_alias=True)
    stacks = {name: np.asarray(stack) for name, stack in params["layers"].items()}
    if leaf.dtype.itemsize == 2:
        return params | {"layers": {name: view(stack.view(np.uint16)) for name, stack in stacks.items()}}
    if leaf.dtype != jnp.float32:
        return params

    def arrange(name: str, weight: np.ndarray) -> Any:
        if not name.startswith("w"):
            return view(weight)
        return OutputMajor.of(weight, device, 2 if name == "wo" else 1)

    layers = tuple(
        {name: arrange(name, stack[i]) for name, stack in stacks.items()} for i in range(len(stacks["attn_norm"]))
    )
    # A tied head is the embedding, which is output-major as it stands.
    tied = "lm_head" not in params
    head = OutputMajor(leaf, leaf.shape[:1]) if tied else OutputMajor.of(np.asarray(params["lm_head"]), device)
    return params | {"layers": layers, "lm_head": head}
