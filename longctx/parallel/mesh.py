"""The mesh of three axes that everything else names."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("stage", "context", "tensor")


def make_mesh(stage: int = 1, context: int = 1, tensor: int = 1) -> Mesh:
    """The first `stage * context * tensor` devices as a mesh of these axes, of type Auto.

    `tensor` runs fastest, as it talks most: it gets neighbouring devices, those of one host. Then `context`.

    Raises:
      ValueError: a size is not a positive integer, or there are too few devices.
    """
    sizes = dict(zip(AXES, (stage, context, tensor), strict=True))
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        raise ValueError(f"stage * context * tensor must be at most the number of devices, {len(devices)}, got {sizes}")
    return Mesh(np.array(devices[:needed]).reshape(stage, context, tensor), AXES, axis_types=(AxisType.Auto,) * 3)
