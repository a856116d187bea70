"""Which layers, KV heads and pages each device of a mesh has: between a page's payload and the pools of devices.

A device's pool is `[layers * pages, page_size, K, H]` (`paged_cache.PagedCache`): the page `page` of the layer in place
`i` of the stage is its row `i * pages + page`.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from longctx.models import LlamaConfig
from longctx.models.layer_runs import layers_of_stages
from longctx.serving.kv_cache.page_layout import PageSlice


class DevicePart(NamedTuple):
    """Part that one device has of the pages of its context rank.

    Attributes:
      rank: context rank.
      part: layers and KV heads of the model.
      padding: layers of zeros before the first of its layers, where stages are uneven.
      is_first: whether it is the first device that has this part; others repeat it, where `tensor` exceeds the model's
        KV heads.
    """

    rank: int
    part: PageSlice
    padding: int
    is_first: bool

    def rows(self, local_pages: np.ndarray, layers: tuple[int, int], num_pages: int) -> np.ndarray:
        """Rows of the pool, int32 `[pages * layers]`, page after page, of pages of the rank and layers of the model."""
        places = np.arange(*layers) - self.part.layers[0] + self.padding
        return (places * num_pages + local_pages[:, None]).astype(np.int32).reshape(-1)


def process_part(mesh: Mesh, config: LlamaConfig) -> PageSlice:
    """The least part of a page that has all that this process's devices have of it."""
    parts = device_parts(mesh, config).items()
    own = [each.part for device, each in parts if device.process_index == jax.process_index()]
    layers, heads = ((min(first), max(stop)) for first, stop in (zip(*x, strict=True) for x in zip(*own, strict=True)))
    return PageSlice(layers, heads)


def device_parts(mesh: Mesh, config: LlamaConfig) -> dict[jax.Device, DevicePart]:
    """Return the part of each device of a mesh."""
    stages, _, tensor = mesh.devices.shape
    layers = layers_of_stages(config.num_layers, stages)
    parts = {}
    for (stage, rank, index), device in np.ndenumerate(mesh.devices):
        real = [layer for layer in layers[stage] if layer is not None]
        first, stop = index * config.num_kv_heads // tensor, -(-(index + 1) * config.num_kv_heads // tensor)
        repeats = max(1, tensor // config.num_kv_heads)
        part = PageSlice((real[0], real[-1] + 1), (first, stop))
        parts[device] = DevicePart(rank, part, len(layers[stage]) - len(real), index % repeats == 0)
    return parts
