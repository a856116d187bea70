"""The parameters of a Llama: a table of named axes determines shapes and shardings.

Layers are stacked along a leading axis for `lax.scan`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from longctx.models.config import LlamaConfig

Params = dict[str, Any]
"""A pytree with the structure of `param_axes`."""

Axes = tuple[str, ...]

_LAYER_AXES: dict[str, Axes] = {
    "attn_norm": ("layer", "hidden"),
    "wq": ("layer", "hidden", "head", "head_dim"),
    "wk": ("layer", "hidden", "kv_head", "head_dim"),
    "wv": ("layer", "hidden", "kv_head", "head_dim"),
    "wo": ("layer", "head", "head_dim", "hidden"),
    "mlp_norm": ("layer", "hidden"),
    "w_gate": ("layer", "hidden", "intermediate"),
    "w_up": ("layer", "hidden", "intermediate"),
    "w_down": ("layer", "intermediate", "hidden"),
}
_BIAS_AXES: dict[str, Axes] = {
    "bq": ("layer", "head", "head_dim"),
    "bk": ("layer", "kv_head", "head_dim"),
    "bv": ("layer", "kv_head", "head_dim"),
}
# The mesh axis of an axis, if the mesh has it and its size divides; other axes are replicated.
_MESH_AXIS = {
    "layer": "stage",
    "head": "tensor",
    "kv_head": "tensor",
    "intermediate": "tensor",
    "vocab": "tensor",
}


def param_axes(config: LlamaConfig) -> Params:
    """The names of every parameter's axes, as a pytree whose leaves are tuples of strings."""
    axes: Params = {
        "embed": ("vocab", "hidden"),
        "layers": _LAYER_AXES | (_BIAS_AXES if config.qkv_bias else {}),
        "final_norm": ("hidden",),
    }
    if not config.tie_embeddings:
        axes["lm_head"] = ("hidden", "vocab")
    return axes


def map_axes(function: Any, axes: Params) -> Params:
    """Map a function over the leaves of `param_axes`, which are tuples and so no leaves to `jax.tree`."""
    return jax.tree.map(function, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def param_shape(config: LlamaConfig, axes: Axes) -> tuple[int, ...]:
    """The sizes of the named axes."""
    sizes = {
        "layer": config.num_layers,
        "hidden": config.hidden_size,
        "head": config.num_heads,
        "kv_head": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
    }
    return tuple(sizes[axis] for axis in axes)


def abstract_params(config: LlamaConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The parameters of `init_params` as a pytree of `jax.ShapeDtypeStruct`."""
    return map_axes(lambda axes: jax.ShapeDtypeStruct(param_shape(config, axes), dtype), param_axes(config))


def init_params(
    config: LlamaConfig, key: jax.Array, dtype: DTypeLike = jnp.float32, initializer_range: float = 0.02
) -> Params:
    """Random parameters: normal weights with standard deviation `initializer_range`, norms of 1, biases of 0."""

    def init(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(leaf.shape, leaf.dtype)
        if name in _BIAS_AXES:
            return jnp.zeros(leaf.shape, leaf.dtype)
        return initializer_range * jax.random.normal(key, leaf.shape, leaf.dtype)

    leaves, structure = jax.tree.flatten_with_path(abstract_params(config, dtype))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [init(*leaf, key) for leaf, key in zip(leaves, keys, strict=True)])


def param_specs(config: LlamaConfig, mesh: Mesh) -> Params:
    """A PartitionSpec per parameter: layers over `stage`, heads, feed-forward and vocabulary over `tensor`.

    An axis is replicated if the mesh lacks its mesh axis, or if the size does not divide.
    """

    def spec(axes: Axes) -> PartitionSpec:
        sharded = zip(axes, param_shape(config, axes), strict=True)
        return PartitionSpec(*(_mesh_axis(mesh, axis, size) for axis, size in sharded))

    return map_axes(spec, param_axes(config))


def _mesh_axis(mesh: Mesh, axis: str, size: int) -> str | None:
    name = _MESH_AXIS.get(axis)
    return name if name in mesh.shape and size % mesh.shape[name] == 0 else None
