"""Stacks the layers of a model anew for stages of a pipeline, where some layers are quantised and others are not."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from longctx.models.config import LlamaConfig
from longctx.models.fp8 import E4M3, PartlyQuantized, RowQuantized
from longctx.models.layer_runs import Run, layer_runs
from longctx.models.layer_stacks import by_run, stacks_of
from longctx.models.params import INPUT_AXES, Params


def stack_for_stages(params: Params, config: LlamaConfig, stages: int) -> Params:
    """The parameters with the structure of `abstract_params(config, stages=stages)`.

    Those that have it already are returned as they are; others, stacked for one stage, are copied to the host.

    Raises:
      ValueError: they have neither structure.
    """
    wanted, given = layer_runs(config, stages), layer_runs(config)
    stacks = [_describe(stack) for stack in stacks_of(params["layers"])]
    if wanted == given or stacks == [*map(_describe_run, wanted)]:
        return params
    if stacks != [*map(_describe_run, given)]:
        raise ValueError(f"params do not have the model's structure, be it for one stage or for {stages}")
    by_layer: dict[int, dict[str, Any]] = {}
    for run, stack in zip(given, stacks_of(params["layers"]), strict=True):
        for i, layer in enumerate(run.layers):
            by_layer[layer] = {name: jax.tree.map(lambda x, i=i: np.asarray(x[i]), w) for name, w in stack.items()}
    dtype = np.dtype(params["embed"].dtype)

    def restack(run: Run) -> dict[str, Any]:
        layers = [by_layer[layer] for layer in run.layers]

        def stack(name: str) -> Any:
            weights = [layer[name] for layer in layers]
            if name in run.partly:
                weights = [_partly(name, weight, dtype, config) for weight in weights]
            return jax.tree.map(lambda *parts: np.stack(parts), *weights)

        return {name: stack(name) for name in layers[0]}

    return params | {"layers": by_run(wanted, restack)}


_Description = tuple[int, frozenset[str], frozenset[str]]  # layers; names that are quantised, and partly so


def _describe(stack: dict[str, Any]) -> _Description:
    quantized = frozenset(name for name, weight in stack.items() if isinstance(weight, RowQuantized))
    partly = frozenset(name for name, weight in stack.items() if isinstance(weight, PartlyQuantized))
    return stack["attn_norm"].shape[0], quantized, partly


def _describe_run(run: Run) -> _Description:
    return len(run.layers), run.quantized, run.partly


def _partly(name: str, weight: Any, dtype: np.dtype[Any], config: LlamaConfig) -> PartlyQuantized:
    """One layer's weight, quantised or not, as `PartlyQuantized` of the model's dtype."""
    assert config.quantization is not None
    bound = config.quantization.activation_scale_ub
    if isinstance(weight, RowQuantized):
        values: Any = weight.values
        return PartlyQuantized(values.view(E4M3).astype(dtype), weight.scale, bound)
    inputs = INPUT_AXES.get(name, 1)
    order = (*range(inputs, weight.ndim), *range(inputs))
    scale: Any = np.zeros(weight.shape[inputs:], np.float32)
    return PartlyQuantized(weight.transpose(order), scale, bound)
