"""The name and the layout of each parameter in a Hugging Face checkpoint.

Hugging Face stores one matrix per layer, `[out, in]`, with heads and head size merged. In this library layers are
stacked, inputs come first and heads have an axis of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from longctx.models.config import LlamaConfig
from longctx.models.params import Axes, param_axes, param_shape

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
    "wo": ("self_attn.o_proj.weight", ("hidden", "head head_dim")),
    "mlp_norm": ("post_attention_layernorm.weight", ("hidden",)),
    "w_gate": ("mlp.gate_proj.weight", ("intermediate", "hidden")),
    "w_up": ("mlp.up_proj.weight", ("intermediate", "hidden")),
    "w_down": ("mlp.down_proj.weight", ("hidden", "intermediate")),
}

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """One parameter, and the tensors of a checkpoint (one, or one per layer) that it consists of.

    `axes` and `shape` describe one tensor in our order, without the layer axis. Layouts that differ only in `names` are
    equal, so that they share compiled functions.
    """

    names: tuple[str, ...] = field(compare=False)
    stacked: bool
    axes: Axes
    shape: tuple[int, ...]
    file_axes: Axes

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


def layouts(config: LlamaConfig) -> dict[str, Any]:
    """A pytree with the structure of the parameters, whose leaves are Layouts."""
    axes = param_axes(config)
    prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]

    def layout(names: list[str], stacked: bool, axes: Axes, file_axes: Axes) -> Layout:
        own = axes[1:] if stacked else axes
        return Layout(tuple(names), stacked, own, param_shape(config, own), file_axes)

    def layer(key: str) -> Layout:
        name, file_axes = _LAYERS[key]
        return layout([prefix + name for prefix in prefixes], True, axes["layers"][key], file_axes)

    def top(key: str) -> Layout:
        name, file_axes = _TOP[key]
        return layout([name], False, axes[key], file_axes)

    return {key: {k: layer(k) for k in axes[key]} if key == "layers" else top(key) for key in axes}
