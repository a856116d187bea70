"""Stacks the layers of a model anew for stages of a pipeline.

That is needed where some layers are quantised and others are not, or where the stages do not divide the layers.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from longctx.kernels.fp8 import E4M3
from longctx.models.config import LlamaConfig
from longctx.models.fp8 import PartlyQuantized, RowQuantized
from longctx.models.layer_runs import Run, layer_runs
from longctx.models.layer_stacks import by_run, stacking_of, stacks_of
from longctx.models.params import INPUT_AXES, Params


def stack_for_stages(params: Params, config: LlamaConfig, stages: int) -> Params:
    """The parameters with their layers stacked for so many stages, or as much apart as they are.

    Those that have this structure already are returned as they are; others are copied to the host.

    Raises:
      ValueError: they have the structure of no number of stages; or of another one than these, and are partly
        quantised, or spread over several processes.
    """
    layers = params["layers"]
    stacking = stacking_of(layers)
    own, new = stacking.stages, stacking._replace(stages=stages)
    wanted, given = layer_runs(config, new), layer_runs(config, stacking)
    if wanted == given:
        return params
    if own > config.num_layers or [*map(_describe, stacks_of(layers))] != [*map(_describe_run, given)]:
        raise ValueError(f"params do not have the model's structure, be it for one stage or for {max(own, stages)}")
    if own > 1 and any(run.partly for run in given):
        raise ValueError(f"params are partly quantised and stacked for {own} stages: load them for {stages}")
    if not all(x.is_fully_addressable for x in jax.tree.leaves(layers) if isinstance(x, jax.Array)):
        raise ValueError(f"params are spread over several processes for {own} stages: load them for {stages}")
    by_layer: dict[int, dict[str, Any]] = {}
    for run, stack in zip(given, stacks_of(layers), strict=True):
        for i, layer in enumerate(run.layers):
            if layer is not None:
                by_layer[layer] = {name: jax.tree.map(lambda x, i=i: np.asarray(x[i]), w) for name, w in stack.items()}
    dtype = np.dtype(params["embed"].dtype)

    def restack(run: Run) -> dict[str, Any]:
        def stack(name: str) -> Any:
            weights = [None if layer is None else by_layer[layer][name] for layer in run.layers]
            if name in run.partly:
                weights = [None if w is None else _partly(name, w, dtype, config) for w in weights]
            zeros = jax.tree.map(np.zeros_like, next(w for w in weights if w is not None))
            return jax.tree.map(lambda *parts: np.stack(parts), *(zeros if w is None else w for w in weights))

        return {name: stack(name) for name in by_layer[0]}

    return params | {"layers": by_run(wanted, restack, new)}


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
