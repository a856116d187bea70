"""Parameters sharded over a mesh `(stage, context, tensor)`, for `Llama.run_layers` or `layer` inside `shard_map`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels.fp8 import E4M3
from longctx.models.config import LlamaConfig
from longctx.models.layer_runs import Run, layer_runs
from longctx.models.layer_stacks import by_run, stacking_of, stacks_of, take_apart
from longctx.models.params import (
    INPUT_AXES,
    Ffn,
    Param,
    Params,
    abstract_params,
    map_table,
    param_specs,
    param_table,
    stacking_on,
)
from longctx.models.projections import OutputMajor, PartlyQuantized, RowQuantized

_ROW_PARALLEL = ("wo", "w_down")
# Projections that are one product on CPUs, as they have the same input.
_FUSED = (("wq", "wk", "wv"), ("wo",), ("w_gate", "w_up"), ("w_down",))


def device_config(config: LlamaConfig, mesh: Mesh) -> LlamaConfig:
    """The configuration after sharding: KV heads are repeated up to `tensor`, and the vocabulary is padded."""
    parts = mesh.shape["tensor"] * mesh.shape["stage"]
    return dataclasses.replace(
        config,
        num_kv_heads=max(config.num_kv_heads, mesh.shape["tensor"]),
        vocab_size=math.ceil(config.vocab_size / parts) * parts,
    )


def shard_params(
    params: Params, config: LlamaConfig, mesh: Mesh, apart: bool | None = None, ffn: Ffn = "tensor"
) -> Params:
    """Shard parameters of one device, or of another mesh, over a mesh.

    Layers are sharded over `stage`; heads, feed-forward and the vocabulary of the embedding over `tensor`; the
    vocabulary of the head over both. Where stages don't divide the layers, smaller stages have a layer of zeros.

    On accelerators layers are apart (`LayerRuns`), as a program copies the weights that it slices out of a stack: each
    place of a stage has arrays `[stage, ...]`, of which a device holds one layer. Stacks are taken apart on the mesh,
    one weight after another; the given ones stay until the caller drops them. Layers that are given apart stay apart on
    any device.

    On the CPUs of one process stacks are arranged so that XLA's backend reads them fast (docs/design.md). `layers`
    becomes a tuple of one pytree for each layer of a stage, `[stage, ...]`, because a program copies weights that it
    slices out of a stack before each product; and projections become `OutputMajor`, which is a copy, those of the same
    input one (under their names with spaces between them). Matrices of 16-bit floats become bits (`kernels.bits`). A
    model with quantised weights keeps its stacks; a slice of a stack of 16-bit floats would convert the whole stack, so
    they become bits too.

    Args:
      apart: whether to take stacks apart; None: on accelerators, not on CPUs.
      ffn: `"all"`: output projections and feed-forward are sharded over `tensor` and `context`; the head of attention
        that a device multiplies by its part of wo is then number `tensor * contexts + context`.
    """
    stacking = stacking_on(config, mesh, apart)
    params = stack_for_stages(params, config, stacking.stages)
    is_apart = stacking_of(params["layers"]).apart
    if mesh.is_multi_process:
        params = _shard_over_processes(params, config, mesh, ffn)
    else:
        params = _shard_in_process(params, config, mesh, ffn, stays_stacked=not (stacking.apart or is_apart))
    if stacking.apart and not is_apart:
        params["layers"] = take_apart(params["layers"], stacking.stages)
    return params


def _shard_in_process(params: Params, config: LlamaConfig, mesh: Mesh, ffn: Ffn, stays_stacked: bool) -> Params:
    dtype = params["embed"].dtype
    if stays_stacked and all(device.platform == "cpu" for device in mesh.devices.flat):
        params = _pad_params(jax.tree.map(np.asarray, params), config, mesh)
        if config.quantization is not None:
            params = _bits_of_floats(params)
        elif all(x.dtype == dtype for x in jax.tree.leaves(params["layers"])):
            params = _arrange_for_cpu(params, mesh, ffn)
    else:
        params = _pad_params(params, config, mesh)
    if "lm_head" not in params:  # the embedding is output-major already
        params["lm_head"] = _head(params["embed"], mesh)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec), may_alias=True)  # noqa: E731
    return jax.tree.map(put, params, sharded_specs(params, config, mesh, ffn))


def _shard_over_processes(params: Params, config: LlamaConfig, mesh: Mesh, ffn: Ffn) -> Params:
    """Shard over several processes: arrays on the mesh stay, and each process takes its part of those that all hold."""

    def finish(params: Params) -> Params:
        params = _pad_params(params, config, mesh)
        return params if "lm_head" in params else params | {"lm_head": _head(params["embed"], mesh)}

    def place(x: Any, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        if isinstance(x, np.ndarray) or x.is_fully_addressable:
            return jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)
        return x

    is_apart = stacking_of(params["layers"]).apart
    params = jax.tree.map(place, params, param_specs(config, mesh, is_apart, ffn))
    wanted = jax.eval_shape(finish, params)
    specs = sharded_specs(wanted, config, mesh, ffn)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    there = dict(jax.tree.leaves_with_path(params))
    leaves, structure = jax.tree.flatten_with_path(wanted)
    changed = {
        path: sharding
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
        if path not in there
        or there[path].shape != leaf.shape
        or not there[path].sharding.is_equivalent_to(sharding, leaf.ndim)
    }

    def change(params: Params) -> list[jax.Array]:
        return [x for path, x in jax.tree.leaves_with_path(finish(params)) if path in changed]

    made = dict(zip(changed, jax.jit(change, out_shardings=[*changed.values()])(params), strict=True))
    return jax.tree.unflatten(structure, [made.get(path, there.get(path)) for path, _ in leaves])


def abstract_sharded_params(
    config: LlamaConfig, mesh: Mesh, dtype: Any = jnp.float32, apart: bool | None = None, ffn: Ffn = "tensor"
) -> Params:
    """Return the result of `shard_params`, but for its arrangement on CPUs, as `jax.ShapeDtypeStruct`."""
    params = abstract_params(device_config(config, mesh), dtype, stacking_on(config, mesh, apart))
    if "lm_head" not in params:
        params["lm_head"] = _head(params["embed"], mesh)
    struct = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(struct, params, sharded_specs(params, config, mesh, ffn))


def sharded_specs(params: Params, config: LlamaConfig, mesh: Mesh, ffn: Ffn = "tensor") -> Params:
    """The PartitionSpecs of the result of `shard_params`."""
    specs = param_specs(device_config(config, mesh), mesh, stacking_of(params["layers"]).apart, ffn)
    head = params["lm_head"]
    if isinstance(head, OutputMajor):
        specs["lm_head"] = OutputMajor(P(("tensor", "stage"), None), head.out_shapes)  # type: ignore[arg-type]
    else:
        specs["lm_head"] = P(None, ("tensor", "stage"))

    if isinstance(params["layers"], tuple):
        return specs | {"layers": tuple(layer_specs(layer, config, mesh, ffn) for layer in params["layers"])}
    return specs


def layer_specs(layer: Params, config: LlamaConfig, mesh: Mesh, ffn: Ffn = "tensor") -> Params:
    """The PartitionSpecs of one of the layers that `shard_params` arranges for CPUs."""
    (specs,) = stacks_of(param_specs(device_config(config, mesh), mesh, apart=False, ffn=ffn)["layers"])

    def of_weight(name: str, weight: Any) -> Any:
        if not isinstance(weight, OutputMajor):
            return specs[name]
        axes = _axes_of(name, ffn)
        spec = P("stage", None, axes) if name in _ROW_PARALLEL else P("stage", axes, None)
        return OutputMajor(spec, weight.out_shapes)  # type: ignore[arg-type]

    return {name: of_weight(name, weight) for name, weight in layer.items()}


def _axes_of(name: str, ffn: Ffn) -> str | tuple[str, ...]:
    """The mesh axes that shard a fused projection."""
    return ("tensor", "context") if ffn == "all" and not name.startswith("wq") else "tensor"


def _pad_params(params: Params, config: LlamaConfig, mesh: Mesh) -> Params:
    """Repeat each KV head in place, and pad the vocabulary with zeros, up to `device_config`."""
    wanted = device_config(config, mesh)
    numpy: Any = np if isinstance(params["embed"], np.ndarray) else jnp
    repeats = wanted.num_kv_heads // config.num_kv_heads
    more = wanted.vocab_size - config.vocab_size

    def pad(param: Param, x: Any) -> Any:
        if repeats > 1 and "kv_head" in param.axes:
            return numpy.repeat(x, repeats, param.axes.index("kv_head"))
        if more and "vocab" in param.axes:
            return numpy.pad(x, [(0, more if axis == "vocab" else 0) for axis in param.axes])
        return x

    return map_table(pad, param_table(config, stacking_of(params["layers"])), params)


def _bits_of_floats(params: Params) -> Params:
    """Stacks of 16-bit floats as views of their bits (see `shard_params`), beside those of quantised weights."""
    dtype = params["embed"].dtype
    layers = jax.tree.map(lambda x: _bits(x) if x.dtype == dtype else x, params["layers"])
    return params | {"layers": layers}


def _bits(x: np.ndarray) -> np.ndarray:
    """A view of 16-bit floats as their bits; wider floats as they are."""
    return x.view(np.uint16) if x.itemsize == 2 else x


def _arrange_for_cpu(params: Params, mesh: Mesh, ffn: Ffn) -> Params:
    """Arrange numpy arrays of one dtype for XLA's CPU backend (see `shard_params`)."""
    stages, dtype = mesh.shape["stage"], params["embed"].dtype
    if dtype.itemsize > 4:
        return params

    def output_major(names: tuple[str, ...], layer: Params) -> OutputMajor:
        matrices, shapes = [], []
        axes = () if names[0] in _ROW_PARALLEL else _axes_of(names[0], ffn)
        share = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
        for name in names:
            outputs = layer[name].shape[3 if name == "wo" else 2 :]
            matrix = layer[name].reshape(stages, -1, math.prod(outputs)).swapaxes(1, 2)
            matrices.append(matrix.reshape(stages, share, -1, matrix.shape[2]))
            shapes.append((outputs[0] // share, *outputs[1:]))
        fused = np.concatenate(matrices, 2)  # each device has its part of every matrix
        matrix = _bits(fused.reshape(stages, -1, fused.shape[3]))
        return OutputMajor(matrix, tuple(shapes))  # type: ignore[arg-type]

    def arrange(layer: Params) -> Params:
        others = {name: weight for name, weight in layer.items() if not name.startswith("w")}
        return others | {" ".join(names): output_major(names, layer) for names in _FUSED}

    (stack,) = stacks_of(params["layers"])  # of a model without quantised weights
    by_stage = {name: x.reshape(stages, -1, *x.shape[1:]) for name, x in stack.items()}
    count = by_stage["attn_norm"].shape[1]
    layers = tuple(arrange({name: stack[:, i] for name, stack in by_stage.items()}) for i in range(count))
    head = np.ascontiguousarray(params["lm_head"].T) if "lm_head" in params else params["embed"]
    return params | {"layers": layers, "lm_head": _head(_bits(head), mesh)}


def _head(matrix: Any, mesh: Mesh) -> OutputMajor:
    """The output head of a matrix `[vocab, D]`."""
    return OutputMajor(matrix, ((matrix.shape[0] // (mesh.shape["tensor"] * mesh.shape["stage"]),),))


def stack_for_stages(params: Params, config: LlamaConfig, stages: int) -> Params:
    """Stack the layers for `stages` stages, or as much apart as they are, if they are not stacked so already.

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
    if own > config.num_layers or _shapes(layers) != _shapes(abstract_params(config, stacking=stacking)["layers"]):
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


def _shapes(layers: Any) -> Any:
    leaves, structure = jax.tree.flatten(layers)
    return structure, [leaf.shape for leaf in leaves]


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
