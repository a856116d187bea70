"""Keys and values as the kernels see them, contiguous or in pages: how to copy a block, and its mask."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.adapter import COLUMN, TILE, broadcast, cast, copy_rows, read
from longctx.kernels.mosaic_gpu.tile_config import TileConfig
from longctx.kernels.work import Tile


class Contiguous(NamedTuple):
    """Keys and values `[B, S, K, H]` (or one `[2, B, S, K, H]` of both, twice), and the mask's arrays, padded.

    These are what `make_tiles` returned, `[2, B, S]` of keys. Backward, from the keys' side, k and v are q and d_out,
    and where queries have limits of their own there are `[3, B, S]`.
    """

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

    def shared(self, tile_config: TileConfig) -> dict[str, Any]:
        """Shared memory besides the rings that are multiplied: none."""
        return {}

    def load(self) -> "Contiguous":
        """Nothing to read once for all blocks."""
        return self

    def find(self, tile: Tile, block: Array, size: int, shared: dict[str, Any]) -> None:
        """Nothing to look up."""

    def fetch(
        self, half: int, tile: Tile, block: Array, head: Array, shared: dict[str, Any], to: Any, barrier: Any
    ) -> None:
        """Copy a block of keys (half 0) or values (half 1) of one head to shared memory."""
        x = (self.k, self.v)[half]
        before = (half, tile.kv) if len(x.shape) == 5 else (tile.kv,)
        copy_rows(x, before, block * to.shape[0], head, to, barrier)

    def seen(self, tile: Tile, rows: tuple[Array, ...], block: Array, shape: tuple[int, int]) -> Array:
        """The mask of a block: bool `shape`, rows by keys. `rows` are what `make_tiles` returned for these rows."""
        at = (tile.kv_tokens, pl.ds(block * shape[1], shape[1]))
        of_others = [broadcast(read(self.tokens.at[(i, *at)], COLUMN), shape, 1) for i in range(self.tokens.shape[0])]
        of_rows = [broadcast(x, shape, 0) for x in rows]
        are_queries = len(of_others) == 3
        (last, segments, *first), keys = (of_others, of_rows) if are_queries else (of_rows, of_others)
        positions, of_keys = keys
        seen = (positions <= last) & (of_keys == segments)
        return seen & (positions >= first[0]) if first else seen

    def clean(self, tile: Tile, block: Array, values: Any) -> None:
        """Nothing to do, as TMA writes zeros for what is beyond the end."""


class Paged(NamedTuple):
    """Pages `[pages, page_size, K, H]` of keys and of values, the page table `[B, M]`, and the first page `[1]`.

    FP8 pages have scales `[pages, K, page_size]`.
    """

    k: Any
    v: Any
    table: Any
    first_page: Any
    k_scale: Any = None
    v_scale: Any = None

    def pad_to_block(self, block: int) -> "Paged":
        """Pages need no padding."""
        return self

    def copies(self, block: int) -> int:
        """Number of copies that `fetch` issues for a block of keys, or of values."""
        return self.pages_of(block) * (1 if self.k_scale is None else 2)

    def pages_of(self, block: int) -> int:
        """Number of pages in which the slots of a block are."""
        return max(1, block // self.k.shape[1])

    def shared(self, tile_config: TileConfig) -> dict[str, Any]:
        """Shared memory besides the rings that are multiplied: the pages of a block, and rings of FP8 blocks."""
        block = tile_config.block_kv
        refs = {"pages": plgpu.SMEM((self.pages_of(block),), jnp.int32)}
        if self.k_scale is not None:
            ring = adapter.tiled((tile_config.num_fp8_stages, block, self.k.shape[-1]), self.k.dtype)
            refs |= {
                "k_fp8": ring,
                "v_fp8": ring,
                "scales": plgpu.SMEM((2, tile_config.num_fp8_stages, block), jnp.float32),
            }
        return refs

    def load(self) -> "Paged":
        """Read once what is the same for all blocks."""
        return self._replace(first_page=self.first_page[0])

    def find(self, tile: Tile, block: Array, size: int, shared: dict[str, Any]) -> None:
        """Read the page table for a block of `size` slots; all reads are in flight together."""
        page_size = self.k.shape[1]
        # Slots beyond those in use are masked, so any page of the pool may be read there.
        last_entry = lax.div(tile.kv_tokens - 1, jnp.int32(page_size))
        for n in range(self.pages_of(size)):
            entry = jnp.minimum(lax.div(block * size, jnp.int32(page_size)) + n, last_entry)
            page = self.table[tile.kv, entry] + self.first_page
            shared["pages"][n] = jnp.clip(page, 0, self.k.shape[0] - 1)

    def fetch(
        self, half: int, tile: Tile, block: Array, head: Array, shared: dict[str, Any], to: Any, barrier: Any
    ) -> None:
        """Copy a block of keys (half 0) or values (half 1) of one head to shared memory."""
        x = (self.k, self.v)[half]

        def fetch_page(page: Array, first: Array, part: Any) -> None:
            copy_rows(x, (page,), first, head, to.at[part], barrier)

        self._for_each_page(block, to.shape[0], shared, fetch_page)

    def fetch_scales(
        self, half: int, tile: Tile, block: Array, head: Array, shared: dict[str, Any], to: Any, barrier: Any
    ) -> None:
        """Copy the scales of a block of keys (half 0) or values (half 1) of one head to shared memory."""
        x = (self.k_scale, self.v_scale)[half]

        def fetch_page(page: Array, first: Array, part: Any) -> None:
            plgpu.copy_gmem_to_smem(x.at[page, head, pl.ds(first, part.size)], to.at[part], barrier)

        self._for_each_page(block, to.shape[0], shared, fetch_page)

    def _for_each_page(
        self, block: Array, size: int, shared: dict[str, Any], fetch_page: Callable[[Array, Array, Any], None]
    ) -> None:
        """Call `fetch_page(page, first slot of the page, slots of the block)` for each page that `find` found."""
        page_size = self.k.shape[1]
        step = min(page_size, size)
        first = lax.rem(block * size, jnp.int32(page_size)) if page_size > size else jnp.int32(0)

        # A loop, as unrolled copies of many small pages need more registers than this warpgroup has.
        def body(n: Array, _: None) -> None:
            fetch_page(shared["pages"][n], first, pl.ds(pl.multiple_of(n * step, 8), step))

        lax.fori_loop(0, size // step, body, None)

    def seen(self, tile: Tile, rows: tuple[Array, ...], block: Array, shape: tuple[int, int]) -> Array:
        """The mask of a block: bool `shape`, rows by slots. `rows` are the last slots seen, and perhaps the first."""
        slots = cast(lax.broadcasted_iota(jnp.int32, shape, 1), TILE) + block * shape[1]
        seen = slots <= broadcast(rows[0], shape, 0)
        return seen & (slots >= broadcast(rows[1], shape, 0)) if len(rows) > 1 else seen

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
