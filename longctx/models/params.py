"""The parameters of a Llama: a table of named axes determines shapes and shardings.

Layers are stacked along a leading axis for `lax.scan`, or apart on accelerators (`stacking_on`): XLA's GPU backend
copies each layer's weights out of a stack before it multiplies by them. Projections have their inputs first; of
quantised ones, outputs come first, as FP8 products on GPUs ask for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from longctx.annotations import Real
from longctx.kernels.fp8 import BITS, quantize_rows
from longctx.models.config import LlamaConfig
from longctx.models.layer_runs import STACKED, Layer, Run, Stacking, layer_runs
from longctx.models.layer_stacks import by_run, stacks_of, take_apart
from longctx.models.projections import PartlyQuantized, RowQuantized
from longctx.models.validation import check_bool

Params = dict[str, Any]
"""A pytree with the structure of `param_table`."""

Axes = tuple[str, ...]

_LAYER_AXES: dict[str, Axes] = {
    "attn_norm": ("layer", "hidden"),
    "wq": ("layer", "hidden", "head", "head_dim"),
    "wk": ("layer", "hidden", "kv_head", "head_dim"),
    "wv": ("layer", "hidden", "kv_head", "head_dim"),
    "wo": ("layer", "out_head", "head_dim", "hidden"),
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
_OUT_BIAS_AXES: dict[str, Axes] = {"bo": ("layer", "hidden")}
_QK_NORM_AXES: dict[str, Axes] = {"q_norm": ("layer", "head_dim"), "k_norm": ("layer", "head_dim")}
_SINK_AXES: dict[str, Axes] = {"sinks": ("layer", "head")}
_POST_NORM_AXES: dict[str, Axes] = {"attn_post_norm": ("layer", "hidden"), "mlp_post_norm": ("layer", "hidden")}
INPUT_AXES = {"wo": 2}
"""The number of input axes of a projection that has not one."""

# The mesh axis of an axis, if the mesh has it and its size divides; other axes are replicated.
_MESH_AXIS = {
    "layer": "stage",
    "head": "tensor",
    "out_head": "tensor",
    "kv_head": "tensor",
    "intermediate": "tensor",
    "vocab": "tensor",
}


_FFN_AXES = ("out_head", "intermediate")
"""Axes of the output projection and of the feed-forward, which are sharded over `context` too with `ffn="all"`."""

Ffn = Literal["tensor", "all"]
"""What shards output projections and feed-forward: the mesh axis `tensor`, or `tensor` and `context`."""


class Param(NamedTuple):
    """Parameter: its axes, the model's layers along the axis "layer", and its dtype (None: that of the model)."""

    axes: Axes
    layers: tuple[Layer, ...] = ()
    dtype: Any = None


def param_table(config: LlamaConfig, stacking: Stacking = STACKED) -> Params:
    """Make a pytree of every parameter, whose leaves are `Param`s, for layers that are stacked so."""
    table: Params = {
        "embed": Param(("vocab", "hidden")),
        "layers": by_run(layer_runs(config, stacking), functools.partial(_layer_table, config), stacking),
        "final_norm": Param(("hidden",)),
    }
    if not config.tie_embeddings:
        table["lm_head"] = Param(("hidden", "vocab"))
    return table


def _layer_table(config: LlamaConfig, run: Run) -> Params:
    def entry(name: str, axes: Axes) -> Any:
        if name not in run.quantized | run.partly:
            return Param(axes, run.layers)
        assert config.quantization is not None
        split = 1 + INPUT_AXES.get(name, 1)
        outputs, inputs = axes[split:], axes[1:split]
        is_partly = name in run.partly
        return (PartlyQuantized if is_partly else RowQuantized)(
            Param(("layer", *outputs, *inputs), run.layers, None if is_partly else BITS),
            Param(("layer", *outputs), run.layers, np.float32),
            config.quantization.activation_scale_ub,
        )

    axes = _LAYER_AXES.copy()
    for has_them, own in (
        (config.qkv_bias, _BIAS_AXES),
        (config.out_bias, _OUT_BIAS_AXES),
        (config.qk_norm, _QK_NORM_AXES),
        (config.attention_sinks, _SINK_AXES),
        (config.gemma_style, _POST_NORM_AXES),
    ):
        axes |= own if has_them else {}
    return {name: entry(name, axes) for name, axes in axes.items()}


def map_table(function: Any, *trees: Params) -> Params:
    """Map a function over the leaves of a `param_table`, and of other trees, which have its structure."""
    return jax.tree.map(function, *trees, is_leaf=lambda leaf: isinstance(leaf, Param))


def param_shape(config: LlamaConfig, param: Param) -> tuple[int, ...]:
    """The sizes of a parameter's axes."""
    sizes = {
        "layer": len(param.layers),
        "hidden": config.hidden_size,
        "head": config.num_heads,
        "out_head": config.num_heads,
        "kv_head": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
    }
    return tuple(sizes[axis] for axis in param.axes)


def abstract_params(config: LlamaConfig, dtype: DTypeLike = jnp.float32, stacking: Stacking = STACKED) -> Params:
    """The parameters as a pytree of `jax.ShapeDtypeStruct`; `stacking` as `param_table` takes it."""
    return map_table(
        lambda param: jax.ShapeDtypeStruct(param_shape(config, param), dtype if param.dtype is None else param.dtype),
        param_table(config, stacking),
    )


def init_params(
    config: LlamaConfig,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    initializer_range: Real = 0.02,
    apart: bool = False,
) -> Params:
    """Make random parameters: normal weights of deviation `initializer_range`, norms that multiply by 1, biases of 0.

    Those of a quantised model are quantised after that; layers that are `apart` have the same weights.
    """
    check_bool("apart", apart)
    if apart:
        params = init_params(config, key, dtype, initializer_range)
        return params | {"layers": take_apart(params["layers"])}
    if config.quantization is not None:
        plain = init_params(dataclasses.replace(config, quantization=None), key, dtype, initializer_range)
        return quantize_params(plain, config)

    def init(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm") and not config.gemma_style:
            return jnp.ones(leaf.shape, leaf.dtype)
        if name.endswith("norm") or name in _BIAS_AXES | _OUT_BIAS_AXES:
            return jnp.zeros(leaf.shape, leaf.dtype)
        return initializer_range * jax.random.normal(key, leaf.shape, leaf.dtype)

    leaves, structure = jax.tree.flatten_with_path(abstract_params(config, dtype))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [init(*leaf, key) for leaf, key in zip(leaves, keys, strict=True)])


def stacking_on(config: LlamaConfig, mesh: Mesh | None, apart: bool | None = None) -> Stacking:
    """Choose how layers are stacked on a mesh, or on the first device if it is None.

    They are stacked for its stages, if there are layers for all, else for 1; `apart` is by default so on accelerators.
    """
    stages = 1 if mesh is None else mesh.shape.get("stage", 1)
    if apart is not None:
        check_bool("apart", apart)
    else:
        apart = (jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]).platform != "cpu"
    return Stacking(stages if stages <= config.num_layers else 1, apart)


def param_specs(config: LlamaConfig, mesh: Mesh, apart: bool | None = None, ffn: Ffn = "tensor") -> Params:
    """A PartitionSpec per parameter: layers over `stage`, heads, feed-forward and vocabulary over `tensor`.

    An axis is replicated if the mesh lacks its mesh axis, or if the size does not divide. Layers are stacked for the
    mesh's stages (`param_table`), and replicated if there are fewer than stages.

    Args:
      config: of the model.
      mesh: with any of the axes `stage`, `context` and `tensor`.
      apart: whether the layers are apart, see `load_checkpoint`; None: on accelerators.
      ffn: `"all"`: output projections and feed-forward are sharded over `tensor` and `context`, as `ParallelPlan.ffn`.

    Returns:
      A pytree as that of the parameters, for `jax.sharding.NamedSharding`.

    Examples:
      >>> from longctx.models import LlamaConfig, param_specs
      >>> from longctx.parallel import make_mesh, use_devices
      >>> config = LlamaConfig.preset("llama-3.2-1b")
      >>> use_devices(8)
      >>> specs = param_specs(config, make_mesh(context=4, tensor=2), apart=False)
      >>> specs["layers"]["wq"]  # layers, hidden, heads, head size
      P('stage', None, 'tensor', None)
    """
    stacking = stacking_on(config, mesh, apart)

    def spec(param: Param) -> PartitionSpec:
        sizes = dict(zip(param.axes, param_shape(config, param), strict=True)) | {"layer": stacking.stages}
        return PartitionSpec(*(_mesh_axes(mesh, axis, sizes[axis], ffn) for axis in param.axes))

    return map_table(spec, param_table(config, stacking))


def _mesh_axes(mesh: Mesh, axis: str, size: int, ffn: Ffn) -> str | tuple[str, ...] | None:
    names = tuple(name for name in (_MESH_AXIS.get(axis), *_ranks_of(axis, ffn)) if name in mesh.shape)
    if not names or size % math.prod(mesh.shape[name] for name in names):
        return None
    return names if len(names) > 1 else names[0]  # type: ignore[return-value]


def _ranks_of(axis: str, ffn: Ffn) -> tuple[str, ...]:
    """The mesh axis beside `tensor` that shards an axis."""
    if ffn not in get_args(Ffn):
        raise ValueError(f"ffn must be one of {', '.join(get_args(Ffn))}, got {ffn!r}")
    return ("context",) if ffn == "all" and axis in _FFN_AXES else ()


def quantize_params(params: Params, config: LlamaConfig) -> Params:
    """Quantise the weights that `config.quantization` names, of parameters of the same model without it."""
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
