"""Keys and values as the kernels see them, contiguous or in pages: how to copy a block, and its mask."""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.adapter import COLUMN, TILE, broadcast, cast, read
from longctx.kernels.mosaic_gpu.work import Tile


class Contiguous(NamedTuple):
    """Keys and values `[B, S, K, H]` (or one `[2, B, S, K, H]` of both, twice), and tokens `[2, B, S]`, padded."""

    k: Any
    v: Any
    tokens: Any

    def pad_to_block(self, block: int) -> "Contiguous":
        """Pad the length to whole blocks, as far as the device needs it (`adapter.pad_for_tma`)."""
        k, v = (adapter.pad_for_tma(x, -3, -x.shape[-3] % block) for x in (self.k, self.v))
        return self._replace(k=k, v=v)

    def copies(self, block: int) -> int:
        """Number of copies that `fetch` issues for a block of keys, or of values."""
        return 1

    def fetch(self, half: int, tile: Tile, block: Array, head: Array, to: Any, barrier: Any) -> None:
        """Copy a block of keys (half 0) or values (half 1) of one head to shared memory."""
        x = (self.k, self.v)[half]
        at = (tile.kv, pl.ds(block * to.shape[0], to.shape[0]), head)
        plgpu.copy_gmem_to_smem(x.at[(half, *at) if len(x.shape) == 5 else at], to, barrier)

    def seen(self, tile: Tile, rows: tuple[Array, Array], block: Array, shape: tuple[int, int]) -> Array:
        """The mask of a block: bool `shape`, rows by keys. `rows` are what `make_tiles` returned for these rows."""
        at = (tile.kv_tokens, pl.ds(block * shape[1], shape[1]))
        positions, segments = (broadcast(read(self.tokens.at[(i, *at)], COLUMN), shape, 1) for i in (0, 1))
        return (positions <= broadcast(rows[0], shape, 0)) & (segments == broadcast(rows[1], shape, 0))

    def clean(self, tile: Tile, block: Array, values: Any) -> None:
        """Nothing to do, as TMA writes zeros for what is beyond the end."""


class Paged(NamedTuple):
    """Pages `[pages, page_size, K, H]` of keys and of values, the page table `[B, M]`, and the first page `[1]`."""

    k: Any
    v: Any
    table: Any
    first_page: Any

    def pad_to_block(self, block: int) -> "Paged":
        """Pages need no padding."""
        return self

    def copies(self, block: int) -> int:
        """Number of copies that `fetch` issues for a block of keys, or of values."""
        return max(1, block // self.k.shape[1])

    def fetch(self, half: int, tile: Tile, block: Array, head: Array, to: Any, barrier: Any) -> None:
        """Copy a block of keys (half 0) or values (half 1) of one head to shared memory."""
        x, size = (self.k, self.v)[half], to.shape[0]
        page_size = x.shape[1]
        step = min(page_size, size)
        # Slots beyond those in use are masked, so any page of the pool may be read there.
        last_entry = lax.div(tile.kv_tokens - 1, jnp.int32(page_size))

        # A loop, as unrolled copies of many small pages need more registers than this warpgroup has.
        def fetch_page(n: Array, _: None) -> None:
            slot = block * size + n * step
            entry = jnp.minimum(lax.div(slot, jnp.int32(page_size)), last_entry)
            page = jnp.clip(self.table[tile.kv, entry] + self.first_page[0], 0, x.shape[0] - 1)
            at = (page, pl.ds(lax.rem(slot, jnp.int32(page_size)), step), head)
            plgpu.copy_gmem_to_smem(x.at[at], to.at[pl.ds(pl.multiple_of(n * step, 8), step)], barrier)

        lax.fori_loop(0, size // step, fetch_page, None)

    def seen(self, tile: Tile, rows: tuple[Array, ...], block: Array, shape: tuple[int, int]) -> Array:
        """The mask of a block: bool `shape`, rows by slots. `rows` holds the last slot that each row sees."""
        slots = cast(lax.broadcasted_iota(jnp.int32, shape, 1), TILE) + block * shape[1]
        return slots <= broadcast(rows[0], shape, 0)

    def clean(self, tile: Tile, block: Array, values: Any) -> None:
        """Set values in slots never written to 0: they may be NaN, which a weight of 0 would not remove."""
        size = values.shape[0]

        @pl.when((block + 1) * size > tile.kv_tokens)
        def _() -> None:
            # In parts of 64 by 64, which fit into registers beside the accumulator.
            for first, column in itertools.product(range(0, size, 64), range(0, values.shape[1], 64)):
                part = values.at[pl.ds(first, 64), pl.ds(column, 64)]
                x = cast(part[...], TILE)
                slots = cast(lax.broadcasted_iota(jnp.int32, x.shape, 0), TILE) + (block * size + first)
                part[...] = jnp.where(slots < tile.kv_tokens, x, jnp.zeros_like(x))
            plgpu.commit_smem()
