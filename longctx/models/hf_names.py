"""The name and the layout of each parameter in a Hugging Face checkpoint.

Hugging Face stores one matrix per layer, `[out, in]`, with heads and head size merged. In this library layers are
stacked, inputs come first (of quantised weights, outputs) and heads have an axis of their own.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np

from longctx.kernels.fp8 import BITS
from longctx.models.config import LlamaConfig
from longctx.models.layer_runs import STACKED, Stacking
from longctx.models.layer_stacks import LayerRuns
from longctx.models.params import Axes, Param, param_shape, param_table

# Name, and the file's axes, where "head head_dim" is one axis of length head * head_dim.
_TOP: dict[str, tuple[str, Axes]] = {
    "embed": ("model.embed_tokens.weight", ("vocab", "hidden")),
    "final_norm": ("model.norm.weight", ("hidden",)),
    "lm_head": ("lm_head.weight", ("vocab", "hidden")),
}
_LAYERS: dict[str, tuple[str, Axes]] = {
    "attn_norm": ("input_layernorm.weight", ("hidden",)),
    "wq": ("self_attn.q_proj.weight", ("head head_dim", "hidden")),
    "wk": ("self_attn.k_proj.weight", ("kv_head head_dim", "hidden")),
    "wv": ("self_attn.v_proj.weight", ("kv_head head_dim", "hidden")),
    "bq": ("self_attn.q_proj.bias", ("head head_dim",)),
    "bk": ("self_attn.k_proj.bias", ("kv_head head_dim",)),
    "bv": ("self_attn.v_proj.bias", ("kv_head head_dim",)),
    "q_norm": ("self_attn.q_norm.weight", ("head_dim",)),
    "k_norm": ("self_attn.k_norm.weight", ("head_dim",)),
    "wo": ("self_attn.o_proj.weight", ("hidden", "out_head head_dim")),
    "mlp_norm": ("post_attention_layernorm.weight", ("hidden",)),
    "bo": ("self_attn.o_proj.bias", ("hidden",)),
    "sinks": ("self_attn.sinks", ("head",)),
    "w_gate": ("mlp.gate_proj.weight", ("intermediate", "hidden")),
    "w_up": ("mlp.up_proj.weight", ("intermediate", "hidden")),
    "w_down": ("mlp.down_proj.weight", ("hidden", "intermediate")),
}
# Norms of Gemma: after attention, before and after the feed-forward.
_GEMMA_LAYERS: dict[str, tuple[str, Axes]] = {
    "attn_post_norm": ("post_attention_layernorm.weight", ("hidden",)),
    "mlp_norm": ("pre_feedforward_layernorm.weight", ("hidden",)),
    "mlp_post_norm": ("post_feedforward_layernorm.weight", ("hidden",)),
}

SCALE_SUFFIX = "_scale"
"""Suffix of the name of a scale, after that of its weight."""

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """One parameter, and the tensors of a checkpoint (one, or one per layer) that it consists of.

    `axes` and `shape` describe one tensor in our order, without the layer axis; `dtype` is ours, None for the one in
    which a model is loaded. Layouts that differ only in `names` are equal, so that they share compiled functions. The
    name None stands for zeros.
    """

    names: tuple[str | None, ...] = field(compare=False)
    stacked: bool
    axes: Axes
    shape: tuple[int, ...]
    file_axes: Axes
    dtype: Any = None

    @property
    def is_e4m3(self) -> bool:
        """Whether the tensors are e4m3, which is kept as bits."""
        return self.dtype == BITS

    @property
    def is_scale(self) -> bool:
        """Whether the tensors are scales of quantised weights."""
        return self.dtype == np.float32

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of each tensor in the file."""
        sizes = self._by_axis(self.shape)
        return tuple(math.prod(sizes[axis] for axis in merged.split()) for merged in self.file_axes)

    def file_slices(self, slices: tuple[slice, ...]) -> tuple[slice, ...]:
        """The part of the file's tensor that holds `slices` of ours; `head_dim` is never sliced."""
        sizes, parts = self._by_axis(self.shape), self._by_axis(slices)
        ranges = []
        for merged in self.file_axes:
            if not merged:  # the axis of size 1 of a scale
                ranges.append(slice(0, 1))
                continue
            outer, *inner = merged.split()
            start, stop, _ = parts[outer].indices(sizes[outer])
            width = math.prod(sizes[axis] for axis in inner)
            ranges.append(slice(start * width, stop * width))
        return tuple(ranges)

    def from_file(self, tensor: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Convert the file's tensor, or a part of it, to ours, of shape `shape`."""
        order, sizes = self._split_file_axes, self._by_axis(shape)
        split = tensor.reshape(tuple(sizes[axis] for axis in order))
        return split.transpose(tuple(order.index(axis) for axis in self.axes))

    def to_file(self, tensor: jax.Array) -> jax.Array:
        """Convert our tensor to the file's."""
        order = self._split_file_axes
        return tensor.transpose(tuple(self.axes.index(axis) for axis in order)).reshape(self.file_shape)

    @property
    def _split_file_axes(self) -> list[str]:
        return [axis for merged in self.file_axes for axis in merged.split()]

    def _by_axis(self, values: tuple[T, ...]) -> dict[str, T]:
        return dict(zip(self.axes, values, strict=True))


def layouts(config: LlamaConfig, stacking: Stacking = STACKED) -> dict[str, Any]:
    """A pytree with the structure of the parameters, whose leaves are Layouts; `stacking` as `param_table` takes it."""
    table = param_table(config, stacking)
    names_of_layers = _LAYERS | (_GEMMA_LAYERS if config.gemma_style else {})

    def layout(param: Param, names: tuple[str | None, ...], file_axes: Axes) -> Layout:
        stacked = "layer" in param.axes
        sizes = param_shape(config, param)[int(stacked) :]
        return Layout(names, stacked, param.axes[int(stacked) :], sizes, file_axes, param.dtype)

    def of_layers(key: str, param: Any) -> Any:
        name, file_axes = names_of_layers[key]

        def of_each(param: Param) -> tuple[str | None, ...]:
            return tuple(None if i is None else f"model.layers.{i}.{name}" for i in param.layers)

        if isinstance(param, Param):
            return layout(param, of_each(param), file_axes)
        assert config.quantization is not None
        quantized = config.quantization.layers
        weights = of_each(param.values)
        scales = (
            None if i is None or key not in quantized[i] else f"{n}{SCALE_SUFFIX}"
            for i, n in zip(param.scale.layers, weights, strict=True)
        )
        return dataclasses.replace(
            param,
            values=layout(param.values, weights, file_axes),
            scale=layout(param.scale, tuple(scales), (file_axes[0], "")),
        )

    def top(key: str) -> Layout:
        name, file_axes = _TOP[key]
        return layout(table[key], (name,), file_axes)

    def of_run(stack: dict[str, Any]) -> dict[str, Any]:
        return {key: of_layers(key, param) for key, param in stack.items()}

    layers = table["layers"]
    if isinstance(layers, LayerRuns):
        stacks: Any = LayerRuns(tuple(map(of_run, layers.stacks)), layers.stacking)
    else:
        stacks = of_run(layers)
    return {key: stacks if key == "layers" else top(key) for key in table}
