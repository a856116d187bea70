"""Where the parameters of a module are, and how a rank gets those that others hold."""

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from longctx.kernels.partitioning import match_varying
from longctx.models.config import LlamaConfig
from longctx.models.params import Param, Params, map_table, param_shape, param_table
from longctx.parallel.mesh_axes import MeshAxes

_OVER_HEADS = ("head", "kv_head", "intermediate")


def weight_specs(config: LlamaConfig, axes: MeshAxes, fsdp: bool) -> Params:
    """A PartitionSpec per parameter: heads and feed-forward over the axis of heads, all else replicated.

    Args:
      fsdp: shard every matrix besides over the axis of sequences, along its first axis that the ranks divide.
    """

    def spec(param: Param) -> P:
        names = [axes.head if axis in _OVER_HEADS else None for axis in param.axes]
        sizes = zip(param.axes, param_shape(config, param), names, strict=True)
        free = [
            i
            for i, (axis, size, name) in enumerate(sizes)
            if axis != "layer" and name is None and size % axes.size(axes.sequence) == 0
        ]
        is_matrix = len(set(param.axes) - {"layer"}) > 1
        if fsdp and free and is_matrix:
            names[free[0]] = axes.sequence
        return P(*names)

    return map_table(spec, param_table(config))


def gather_weights(weights: Params, specs: Params, axes: MeshAxes, is_layer: bool = False) -> Params:
    """Whole parameters, in all but heads, inside `shard_map`. They vary over the axes of tokens, replicated ones too.

    So the gradient of each is summed over the ranks once, here, and not where chunks of tokens use it; that of a
    sharded one is a reduce-scatter.

    Args:
      is_layer: the weights are of one layer, the specs of a stack.
    """

    def gather(x: Array, spec: P) -> Array:
        names = tuple(spec)[1 if is_layer else 0 :]
        if axes.sequence in names:
            x = lax.all_gather(x, axes.sequence, axis=names.index(axes.sequence), tiled=True)
        for name in (axes.sequence, axes.batch):
            x = x if name is None else match_varying(x, name)
        return x

    return jax.tree.map(gather, weights, specs)
