"""Caches of known pages on meshes, and what their pages are, by the description of `PagedCache`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from longctx.models import LlamaConfig
from longctx.models.layer_runs import layers_of_stages
from longctx.parallel.mesh import make_mesh, named_sharding
from longctx.serving.runner.page_transfer import PageTransfer
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.step import state_specs

PAGE_SIZE, NUM_PAGES, NUM_WINDOW_PAGES = 4, 12, 7  # pages of each rank


def make_config(num_layers: int = 5, num_kv_heads: int = 4, sliding: tuple[bool, ...] = ()) -> LlamaConfig:
    config = LlamaConfig(50, 16, 16, num_layers, 8, num_kv_heads, 2)
    return dataclasses.replace(config, sliding_window=6, sliding_layers=sliding) if sliding else config


class PageCase:
    """A mesh whose pools have random pages.

    Attributes:
      payload: of all pages, `[pages, layers, 2, page_size, K, row_size]`.
      window_pages: of all pages, some of which have none, in a model with sliding layers; else None.
    """

    def __init__(self, sizes: tuple[int, int, int], config: LlamaConfig, dtype: str = "float32", seed: int = 0) -> None:
        self.mesh: Mesh = make_mesh(*sizes)
        self.config, self.num_pages = config, NUM_PAGES * sizes[1]
        self.window_pages: list[int] | None = None
        has_window, numbers = config.sliding_window is not None, np.random.default_rng(seed)
        if has_window:
            kept = [numbers.permutation([*range(NUM_WINDOW_PAGES), *[-1] * (NUM_PAGES - NUM_WINDOW_PAGES)])]
            kept += [numbers.permutation(kept[0]) for _ in range(sizes[1] - 1)]
            self.window_pages = [
                -1 if at < 0 else rank * NUM_WINDOW_PAGES + int(at) for rank, each in enumerate(kept) for at in each
            ]
        window = NUM_WINDOW_PAGES if has_window else 0
        self.transfer = PageTransfer(self.mesh, config, NUM_PAGES, PAGE_SIZE, dtype, window)
        self.fill(seed)

    def window_of(self, pages: list[int]) -> list[int] | None:
        return None if self.window_pages is None else [self.window_pages[page] for page in pages]

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
        """The row of the whole pool of each (page, layer) that there is."""
        _, ranks, _ = self.mesh.devices.shape
        rows, per_device = {}, self._rows_of_device()
        for stage, layers in enumerate(self._kinds()):
            before = [0, self._most(False) * NUM_PAGES]
            for layer, slides in layers:
                for page in range(self.num_pages):
                    rank, local = divmod(page, NUM_PAGES)
                    if slides and self.window_pages is not None:
                        local = self.window_pages[page] - rank * NUM_WINDOW_PAGES
                    if layer is not None and local >= 0:
                        rows[page, layer] = (stage * ranks + rank) * per_device + before[slides] + local
                before[slides] += NUM_WINDOW_PAGES if slides else NUM_PAGES
        return rows

    def _kinds(self) -> list[list[tuple[int | None, bool]]]:
        """The layers of each stage, and whether they are sliding."""
        slides = self.config.sliding_layers or (False,) * self.config.num_layers
        stages = layers_of_stages(self.config.num_layers, self.mesh.devices.shape[0])
        return [[(layer, layer is not None and slides[layer]) for layer in layers] for layers in stages]

    def _most(self, slides: bool) -> int:
        return max(sum(kind == slides for _, kind in layers) for layers in self._kinds())

    def _rows_of_device(self) -> int:
        return self._most(False) * NUM_PAGES + self._most(True) * NUM_WINDOW_PAGES

    def _put(self, payload: np.ndarray) -> PagedCache:
        stages, ranks, _ = self.mesh.devices.shape
        rows, repeats = self._rows(), self._repeats
        count = stages * ranks * self._rows_of_device()
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
