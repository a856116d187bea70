"""The mesh of the axes `stage`, `context` and `tensor`, and queries of its axes inside `shard_map`."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.parallel.topology import AXES


def make_mesh(
    stage: int = 1,
    context: int = 1,
    tensor: int = 1,
    *,
    data: int | None = None,
    names: Mapping[str, str] | None = None,
    axis_type: AxisType = AxisType.Auto,
) -> Mesh:
    """Make a mesh of the first `stage * context * tensor` devices, or of `data` times as many.

    `tensor` runs fastest, because it communicates most: it gets neighbouring devices, those of one host. `context` is
    next, `data` slowest.

    Args:
      stage, context, tensor: devices of the pipeline, of the ring, and of tensor parallelism.
      data: devices of data parallelism, the first axis. None: there is no such axis.
      names: names of your own for some of the axes, such as `{"context": "sp"}`.
      axis_type: of all axes; with `AxisType.Explicit`, types of arrays say how they are sharded.

    Returns:
      A mesh of the axes `stage`, `context` and `tensor`, for `jax.shard_map` and the functions of this package, and
      `jax.set_mesh`. The engine takes a mesh of these axes alone.

    Raises:
      ValueError: a size is not a positive integer, there are too few devices, or a name is twice or of no axis.

    Examples:
      >>> from longctx.parallel import make_mesh, use_devices
      >>> use_devices(8)
      >>> mesh = make_mesh(context=4, tensor=2)
      >>> dict(mesh.shape)
      {'stage': 1, 'context': 4, 'tensor': 2}
      >>> dict(make_mesh(context=4, data=2, names={"context": "sp"}).shape)
      {'data': 2, 'stage': 1, 'sp': 4, 'tensor': 1}
    """
    sizes = ({} if data is None else {"data": data}) | dict(zip(AXES, (stage, context, tensor), strict=True))
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        product = " * ".join(sizes)
        raise ValueError(f"{product} must be at most the number of devices, {len(devices)}, got {sizes}")
    own = {} if names is None else names
    are_names = isinstance(own, Mapping) and all(isinstance(name, str) for name in own.values())
    if not are_names or not own.keys() <= sizes.keys() or len({own.get(name, name) for name in sizes}) < len(sizes):
        raise ValueError(f"names must give different names to some of the axes {', '.join(sizes)}, got {names!r}")
    axes = [own.get(name, name) for name in sizes]
    return Mesh(np.array(devices[:needed]).reshape(*sizes.values()), axes, axis_types=(axis_type,) * len(axes))


def shard_map(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Apply `jax.shard_map` over the axes with more than one device; with a single device, return the function itself.

    XLA's CPU backend keeps collectives over one device, and types would require them. Inside, `size_of` and `index_of`
    answer for all axes, and code exchanges over `present` axes alone.
    """
    trimmed = trim_mesh(mesh)
    if trimmed.size == 1:
        return function
    is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
    specs = jax.tree.map(functools.partial(_trim, trimmed), (in_specs, out_specs), is_leaf=is_spec)
    return jax.shard_map(function, mesh=trimmed, in_specs=specs[0], out_specs=specs[1])


def named_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """A sharding over the mesh that `shard_map` uses: one over the whole mesh would be different to `jax.jit`."""
    trimmed = trim_mesh(mesh)
    return NamedSharding(trimmed, _trim(trimmed, spec))


@functools.cache
def trim_mesh(mesh: Mesh) -> Mesh:
    """The mesh without its axes of one device; if all have one, with the first alone."""
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1] or mesh.axis_names[:1]
    sizes = [mesh.shape[name] for name in names]
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def _trim(trimmed: Mesh, spec: P) -> P:
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    kept = [tuple(name for name in entry if name in trimmed.axis_names) or None for entry in entries]
    while kept and kept[-1] is None:
        kept.pop()
    return P(*kept)


def size_of(axis: str) -> int:
    """Inside `shard_map`: the number of devices of an axis, 1 if it was dropped."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return 1


def index_of(*axes: str) -> Array | int:
    """Inside `shard_map`: this device's index along some axes, of which the first runs slowest."""
    index: Array | int = 0
    for axis in axes:
        if size_of(axis) > 1:
            index = index * size_of(axis) + lax.axis_index(axis)
    return index


def present(*axes: str) -> tuple[str, ...]:
    """Inside `shard_map`: those of the given axes that have more than one device."""
    return tuple(axis for axis in axes if size_of(axis) > 1)
