"""Parameters sharded over a mesh `(stage, context, tensor)`, for `Llama.run_layers` inside `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.models.config import LlamaConfig
from longctx.models.cpu_weights import OutputMajor
from longctx.models.params import Params, abstract_params, param_specs

_ROW_PARALLEL = ("wo", "w_down")


def device_config(config: LlamaConfig, mesh: Mesh) -> LlamaConfig:
    """The configuration after sharding: KV heads are repeated up to `tensor`, and the vocabulary is padded."""
    parts = mesh.shape["tensor"] * mesh.shape["stage"]
    return dataclasses.replace(
        config,
        num_kv_heads=max(config.num_kv_heads, mesh.shape["tensor"]),
        vocab_size=math.ceil(config.vocab_size / parts) * parts,
    )


def shard_params(params: Params, config: LlamaConfig, mesh: Mesh) -> Params:
    """Shard parameters of one device, or of another mesh, over a mesh.

    Layers are sharded over `stage`; heads, feed-forward and the vocabulary of the embedding over `tensor`; the
    vocabulary of the head over both.

    On the CPUs of one process they are arranged so that XLA's backend reads them fast (docs/design.md). In float32,
    `layers` becomes a tuple of one pytree for each layer of a stage, `[stage, ...]`, because a program copies weights
    that it slices out of a stack before each product; and projections become `OutputMajor`, which is a copy. A slice of
    a stack of 16-bit floats converts the whole stack each time, so such stacks become views of their bits
    (`kernels.bits`).
    """
    dtype = params["embed"].dtype
    if mesh.is_multi_process:
        return _shard_over_processes(params, config, mesh)
    if all(device.platform == "cpu" for device in mesh.devices.flat):
        params = _pad_params(jax.tree.map(np.asarray, params), config, mesh)
        if all(stack.dtype == dtype for stack in params["layers"].values()):
            params = _arrange_for_cpu(params, mesh)
    else:
        params = _pad_params(params, config, mesh)
    if "lm_head" not in params:  # the embedding is output-major already
        params["lm_head"] = _head(params["embed"], mesh)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec), may_alias=True)  # noqa: E731
    return jax.tree.map(put, params, sharded_specs(params, config, mesh))


def _shard_over_processes(params: Params, config: LlamaConfig, mesh: Mesh) -> Params:
    """Shard over several processes. Arrays on the mesh stay there; of arrays that every process holds, each takes its
    part.

    Arrays with the right sharding are not copied.
    """

    def finish(params: Params) -> Params:
        params = _pad_params(params, config, mesh)
        return params if "lm_head" in params else params | {"lm_head": _head(params["embed"], mesh)}

    def place(x: jax.Array, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        if x.is_fully_addressable:
            return jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)
        return x

    params = jax.tree.map(place, params, param_specs(config, mesh))
    wanted = jax.eval_shape(finish, params)
    specs = sharded_specs(wanted, config, mesh)
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


def abstract_sharded_params(config: LlamaConfig, mesh: Mesh, dtype: Any = jnp.float32) -> Params:
    """The result of `shard_params` on accelerators as `jax.ShapeDtypeStruct`; no array is allocated."""
    params = abstract_params(device_config(config, mesh), dtype)
    if "lm_head" not in params:
        params["lm_head"] = _head(params["embed"], mesh)
    struct = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(struct, params, sharded_specs(params, config, mesh))


def sharded_specs(params: Params, config: LlamaConfig, mesh: Mesh) -> Params:
    """The PartitionSpecs of the result of `shard_params`."""
    specs = param_specs(device_config(config, mesh), mesh)
    head = params["lm_head"]
    if isinstance(head, OutputMajor):
        specs["lm_head"] = OutputMajor(P(("tensor", "stage"), None), head.out_shape)  # type: ignore[arg-type]
    else:
        specs["lm_head"] = P(None, ("tensor", "stage"))

    def of_matrix(name: str, weight: Any) -> Any:
        if not isinstance(weight, OutputMajor):
            return specs["layers"][name]
        spec = P("stage", None, "tensor") if name in _ROW_PARALLEL else P("stage", "tensor", None)
        return OutputMajor(spec, weight.out_shape)  # type: ignore[arg-type]

    if isinstance(params["layers"], tuple):
        layers = tuple({name: of_matrix(name, x) for name, x in layer.items()} for layer in params["layers"])
        return specs | {"layers": layers}
    return specs


def local_params(params: Params) -> Params:
    """Inside `jax.shard_map`: the parameters of this device, with layers as `Llama.run_layers` takes them."""
    if not isinstance(params["layers"], tuple):
        return params
    return params | {"layers": jax.tree.map(lambda x: x.reshape(x.shape[1:]), params["layers"])}


def _pad_params(params: Params, config: LlamaConfig, mesh: Mesh) -> Params:
    """Repeat each KV head in place, and pad the vocabulary with zeros, up to `device_config`."""
    wanted = device_config(config, mesh)
    numpy: Any = np if isinstance(params["embed"], np.ndarray) else jnp
    repeats, more = wanted.num_kv_heads // config.num_kv_heads, wanted.vocab_size - config.vocab_size
    layers = dict(params["layers"])
    if repeats > 1:
        for name, axis in (("wk", 2), ("wv", 2), ("bk", 1), ("bv", 1)):
            if name in layers:
                layers[name] = numpy.repeat(layers[name], repeats, axis)
    filled = params | {"layers": layers}
    if more:
        filled["embed"] = numpy.pad(params["embed"], ((0, more), (0, 0)))
        if "lm_head" in params:
            filled["lm_head"] = numpy.pad(params["lm_head"], ((0, 0), (0, more)))
    return filled


def _arrange_for_cpu(params: Params, mesh: Mesh) -> Params:
    """Arrange numpy arrays of one dtype for XLA's CPU backend (see `shard_params`)."""
    stages, tensor, dtype = mesh.shape["stage"], mesh.shape["tensor"], params["embed"].dtype
    if dtype.itemsize == 2:
        return params | {"layers": {name: stack.view(np.uint16) for name, stack in params["layers"].items()}}
    if dtype != np.float32:
        return params

    def arrange(name: str, weight: np.ndarray) -> Any:
        if not name.startswith("w"):
            return weight
        outputs = weight.shape[3 if name == "wo" else 2 :]
        matrix = np.ascontiguousarray(weight.reshape(stages, -1, math.prod(outputs)).swapaxes(1, 2))
        share = 1 if name in _ROW_PARALLEL else tensor
        return OutputMajor(matrix, (outputs[0] // share, *outputs[1:]))  # type: ignore[arg-type]

    by_stage = {name: x.reshape(stages, -1, *x.shape[1:]) for name, x in params["layers"].items()}
    count = by_stage["attn_norm"].shape[1]
    layers = tuple({name: arrange(name, stack[:, i]) for name, stack in by_stage.items()} for i in range(count))
    head = {"lm_head": _head(np.ascontiguousarray(params["lm_head"].T), mesh)} if "lm_head" in params else {}
    return params | {"layers": layers} | head


def _head(matrix: Any, mesh: Mesh) -> OutputMajor:
    """The output head of a matrix `[vocab, D]`."""
    return OutputMajor(matrix, (matrix.shape[0] // (mesh.shape["tensor"] * mesh.shape["stage"]),))
