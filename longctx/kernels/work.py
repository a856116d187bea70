"""The assignment of work to multiprocessors: tiles of query rows, each over a range of key blocks.

An item is a tile of one row head. A worker is a persistent thread block; it takes several items. Two assignments exist:

- `equal_shares`: the blocks of all items are concatenated and divided into equal shares. So a chunk of a few tokens
  against a million cached ones fills the chip, and so does a batch of decodes of unequal lengths. A worker's part of an
  item is a piece, and the pieces of an item merge.
- `whole_items`: where there are many items of similar length, each is computed whole, and there is nothing to merge.

Source: the split over keys as in Flash-Decoding (Dao et al. 2023); equal shares as in Stream-K (Osama et al. 2023);
longest first after Graham's list scheduling (1969).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array


class Tiles(NamedTuple):
    """Tiles of query rows and the key blocks that they see: int32 `[tiles]` each."""

    q_batch: Array
    q_row: Array  # first row of the tile
    kv: Array  # entry of the keys' batch, or sequence of the page table
    kv_tokens: Array  # entry of the keys' tokens (contiguous), or slots written (paged)
    start: Array  # blocks [start, stop), of which [full_start, full_stop) need no mask
    full_start: Array
    full_stop: Array
    stop: Array


class Work(NamedTuple):
    """The tables that a kernel reads, int32."""

    tiles: Array  # [tiles, 8]: the fields of Tiles
    items: Array  # [items, 4], as they are taken: head, tile, first unit, and piece minus the worker's number
    workers: Array  # [workers, 4]: positions [first, stop) in `items`, and units [start, stop)
    pieces: Array | None  # [heads * tiles, 2]: the first piece of an item and how many it has; None: items are whole


def equal_shares(tiles: Tiles, heads: int, num_workers: int) -> Work:
    """Divide the blocks of all items equally. At most `items + num_workers` pieces; no piece for an empty item.

    A unit is one block of one item; units are counted over the items of all heads, head by head. A share may be one
    block: more pieces to merge cost less than a second block of one worker.
    """
    num_tiles = tiles.start.shape[0]
    num_units = jnp.tile(tiles.stop - tiles.start, heads)
    stop_unit = jnp.cumsum(num_units, dtype=jnp.int32)
    first_unit, total = stop_unit - num_units, stop_unit[-1]
    share = jnp.maximum(-(-total // num_workers), 1)
    worker = jnp.arange(num_workers, dtype=jnp.int32)
    start = jnp.minimum(worker * share, total)
    stop = jnp.minimum(start + share, total)
    first_item = jnp.searchsorted(stop_unit, start, side="right", method="compare_all").astype(jnp.int32)
    stop_item = jnp.searchsorted(first_unit, stop, side="left", method="compare_all").astype(jnp.int32)
    stop_item = jnp.where(start < stop, stop_item, first_item)
    first_worker = first_unit // share
    num_pieces = jnp.where(num_units > 0, (stop_unit - 1) // share - first_worker + 1, 0)
    first_piece = jnp.cumsum(num_pieces, dtype=jnp.int32) - num_pieces
    item = jnp.arange(heads * num_tiles, dtype=jnp.int32)
    items = jnp.stack([item // num_tiles, item % num_tiles, first_unit, first_piece - first_worker], 1)
    workers = jnp.stack([first_item, stop_item, start, stop], 1)
    return Work(jnp.stack(tiles, 1), items, workers, jnp.stack([first_piece, num_pieces], 1))


def whole_items(tiles: Tiles, heads: int, num_workers: int) -> Work:
    """Distribute whole items over the workers, longest first, in snake order.

    So the loads of two workers differ by at most one item, in blocks and in number. The heads of a tile are neighbours:
    they run at the same time, and those that share keys find them in the cache.
    """
    num_tiles = tiles.start.shape[0]
    num_items = heads * num_tiles
    num_workers = min(num_workers, num_items)
    num_rounds = -(-num_items // num_workers)
    longest_first = jnp.argsort(tiles.start - tiles.stop, stable=True).astype(jnp.int32)
    worker = jnp.arange(num_workers, dtype=jnp.int32)[:, None]
    round_ = jnp.arange(num_rounds, dtype=jnp.int32)[None]
    rank = round_ * num_workers + jnp.where(round_ % 2 == 0, worker, num_workers - 1 - worker)
    num_own = jnp.sum(rank < num_items, 1, dtype=jnp.int32)
    rank = jnp.minimum(rank, num_items - 1).ravel()
    none = jnp.zeros_like(rank)
    items = jnp.stack([rank % heads, longest_first[rank // heads], none, none], 1)
    first = worker[:, 0] * num_rounds
    everything = jnp.full_like(first, jnp.iinfo(jnp.int32).max)
    workers = jnp.stack([first, first + num_own, jnp.zeros_like(first), everything], 1)
    return Work(jnp.stack(tiles, 1), items, workers, None)


class Tile(NamedTuple):
    """A worker's part of an item, as scalars: its row of `Work.tiles`, with blocks limited to the worker's units."""

    q_batch: Any
    q_row: Any
    kv: Any
    kv_tokens: Any
    start: Any
    full_start: Any
    full_stop: Any
    stop: Any
    number: Any  # of the tile
    head: Any = None
    piece: Any = None  # the place of the result, where items have pieces

    @classmethod
    def of(cls, tiles: Any, items: Any, position: Any, worker: Any, first_unit: Any, stop_unit: Any) -> "Tile":
        """The item at a position of `Work.items`."""
        # + 0 drops the mesh axes from the types, as loop bounds must not vary over them.
        head, number, unit, piece = (items[position, i] + 0 for i in range(4))
        q_batch, q_row, kv, kv_tokens, start, full_start, full_stop, stop = (tiles[number, i] + 0 for i in range(8))
        first = start + jnp.maximum(first_unit - unit, 0)
        stop = start + jnp.minimum(stop_unit - unit, stop - start)
        full_start = jnp.clip(full_start, first, stop)
        full_stop = jnp.clip(full_stop, full_start, stop)
        ranges = (first, full_start, full_stop, stop)
        return cls(q_batch, q_row, kv, kv_tokens, *ranges, number, head, piece + worker)

    @property
    def num_full(self) -> Array:
        return self.full_stop - self.full_start

    @property
    def num_blocks(self) -> Array:
        return self.stop - self.start

    def edge(self, n: Array) -> Array:
        """The n-th block that needs a mask."""
        block = self.start + n
        return jnp.where(block < self.full_start, block, block + self.num_full)

    def block(self, n: Array) -> Array:
        """The n-th block in the order of the loop: full ones come first."""
        return jnp.where(n < self.num_full, self.full_start + n, self.edge(n - self.num_full))
