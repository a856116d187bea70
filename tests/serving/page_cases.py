"""Caches of known pages on meshes, and what their pages are, by the description of `PagedCache`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from longctx.models import LlamaConfig
from longctx.models.layer_runs import layers_of_stages, layers_per_stage
from longctx.parallel.mesh import make_mesh, named_sharding
from longctx.serving.runner.page_transfer import PageTransfer
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.step import state_specs

PAGE_SIZE, NUM_PAGES = 4, 12  # pages of each rank


def make_config(num_layers: int = 5, num_kv_heads: int = 4) -> LlamaConfig:
    return LlamaConfig(50, 16, 16, num_layers, 8, num_kv_heads, 2)


class PageCase:
    """A mesh whose pools have random pages.

    Attributes:
      payload: of all pages, `[pages, layers, 2, page_size, K, row_size]`.
    """

    def __init__(self, sizes: tuple[int, int, int], config: LlamaConfig, dtype: str = "float32", seed: int = 0) -> None:
        self.mesh: Mesh = make_mesh(*sizes)
        self.config, self.num_pages = config, NUM_PAGES * sizes[1]
        self.transfer = PageTransfer(self.mesh, config, NUM_PAGES, PAGE_SIZE, dtype)
        self.fill(seed)

    def fill(self, seed: int = 0) -> None:
        layout, random = self.transfer.layout, np.random.default_rng(seed)
        most = 2 ** min(16, 8 * layout.bits.itemsize)
        self.payload = random.integers(0, most, (self.num_pages, *layout.shape)).astype(layout.bits)
        self.cache = self._put(self.payload)

    def zeros(self) -> None:
        self.payload = np.zeros_like(self.payload)
        self.cache = self._put(self.payload)

    def on_devices(self) -> np.ndarray:
        """The payload of all pages as the devices have it; all copies of a KV head must be the same."""
        repeats = self._repeats
        found = np.zeros_like(self.payload)
        pools = [np.asarray(pool) for pool in self.cache if pool is not None]
        for (page, layer), row in self._rows().items():
            for j in range(2):
                heads = pools[j][row]
                if self.transfer.layout.has_scales:
                    scales = np.ascontiguousarray(pools[2 + j][row].T)[..., None].view(np.uint8)
                    heads = np.concatenate([heads, scales], -1)
                heads = heads.reshape(PAGE_SIZE, -1, repeats, heads.shape[-1])
                assert (heads == heads[:, :, :1]).all(), "copies of a KV head differ"
                found[page, layer, j] = heads[:, :, 0]
        return found

    @property
    def _repeats(self) -> int:
        return max(1, self.mesh.shape["tensor"] // self.config.num_kv_heads)

    def _rows(self) -> dict[tuple[int, int], int]:
        """The row of the whole pool of each (page, layer)."""
        stages, ranks, _ = self.mesh.devices.shape
        each = layers_per_stage(self.config.num_layers, stages)
        rows = {}
        for stage, layers in enumerate(layers_of_stages(self.config.num_layers, stages)):
            for place, layer in enumerate(layers):
                for page in range(self.num_pages):
                    rank, local = divmod(page, NUM_PAGES)
                    if layer is not None:
                        rows[page, layer] = ((stage * ranks + rank) * each + place) * NUM_PAGES + local
        return rows

    def _put(self, payload: np.ndarray) -> PagedCache:
        stages, ranks, _ = self.mesh.devices.shape
        rows, repeats = self._rows(), self._repeats
        count = stages * ranks * layers_per_stage(self.config.num_layers, stages) * NUM_PAGES
        pools: list[np.ndarray] = []
        for j in range(2):
            pool = np.zeros((count, PAGE_SIZE, payload.shape[4] * repeats, payload.shape[5]), payload.dtype)
            for (page, layer), row in rows.items():
                pool[row] = np.repeat(payload[page, layer, j], repeats, 1)
            pools.append(pool)
        specs: Any = state_specs(stages, ranks, self.transfer.layout.has_scales).cache
        shardings = [named_sharding(self.mesh, spec) for spec in specs if spec is not None]
        if self.transfer.layout.has_scales:
            size = self.config.head_dim
            scales = [np.ascontiguousarray(pool[..., size:]).view(np.float32)[..., 0] for pool in pools]
            pools = [*(np.ascontiguousarray(pool[..., :size]) for pool in pools), *(x.swapaxes(1, 2) for x in scales)]
        # The memory of a numpy array is not the device's to donate.
        arrays = [jnp.copy(jax.device_put(x, sharding)) for x, sharding in zip(pools, shardings, strict=True)]
        return PagedCache(*arrays)
