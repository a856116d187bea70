"""Quantises the weights of a model in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from longctx.kernels.fp8 import BITS, quantize_rows
from longctx.models.config import LlamaConfig
from longctx.models.fp8 import RowQuantized
from longctx.models.layer_runs import Run, layer_runs
from longctx.models.layer_stacks import by_run, stacks_of
from longctx.models.params import INPUT_AXES, Params


def quantize_params(params: Params, config: LlamaConfig) -> Params:
    """Quantise the weights that `config.quantization` names.

    Args:
      params: those of the same configuration with `quantization=None`.

    Returns:
      Parameters with the structure of `abstract_params(config)`.
    """
    (plain,) = stacks_of(params["layers"])

    def of_run(run: Run) -> Params:
        first = run.layers[0]
        assert first is not None  # one stage has no layers of zeros
        stack = jax.tree.map(lambda x: x[first : first + len(run.layers)], plain)
        return {name: _quantize(name, x, config) if name in run.quantized else x for name, x in stack.items()}

    return params | {"layers": by_run(layer_runs(config), of_run)}


def _quantize(name: str, stack: jax.Array, config: LlamaConfig) -> RowQuantized:
    """A stack `[layer, *inputs, *outputs]`."""
    assert config.quantization is not None
    inputs = INPUT_AXES.get(name, 1)
    order = (0, *range(1 + inputs, stack.ndim), *range(1, 1 + inputs))
    values, scale = quantize_rows(jnp.transpose(stack, order), inputs)
    return RowQuantized(lax.bitcast_convert_type(values, BITS), scale, config.quantization.activation_scale_ub)
