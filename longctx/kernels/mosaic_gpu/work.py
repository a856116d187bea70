"""The assignment of work to multiprocessors: tiles of query rows, each over a range of key blocks.

The blocks of all tiles are concatenated and divided into equal shares, one for each worker (a persistent thread block).
So a chunk of a few tokens against a million cached ones fills the chip, and so does a batch of decodes of unequal
lengths. A worker's part of one tile is a piece, and the pieces of a tile merge. Where there are many more tiles than
multiprocessors, each tile is a worker of its own, and there is nothing to merge.

Source: the split over keys as in Flash-Decoding (Dao et al. 2023); equal shares as in Stream-K (Osama et al. 2023).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

# A worker takes at least this many blocks: writing and merging a piece costs about as much as one block.
LEAST_SHARE = 4


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
    """The tables that a kernel reads."""

    tiles: Array  # [tiles, 10]: the fields of Tiles, the first unit, and the piece minus the worker's number
    workers: Array  # [workers, 4]: tiles [first, stop) and units [start, stop); a unit is one block of one tile
    first_piece: Array  # [tiles]
    num_pieces: Array  # [tiles]


def one_worker_per_tile(tiles: Tiles) -> Work:
    """Assign each tile to a worker, the last tile first: in most layouts it sees most, and should not begin last."""
    num_units, first_unit = _units(tiles)
    number = jnp.arange(len(num_units), dtype=jnp.int32)
    table = jnp.stack([*tiles, first_unit, 2 * number - (len(num_units) - 1)], 1)
    workers = jnp.stack([number, number + 1, first_unit, first_unit + num_units], 1)[::-1]
    return Work(table, workers, number, jnp.ones_like(number))


def equal_shares(tiles: Tiles, num_workers: int) -> Work:
    """Divide the blocks of all tiles equally. At most `tiles + num_workers` pieces; no piece for an empty tile."""
    num_units, first_unit = _units(tiles)
    stop_unit = first_unit + num_units
    total = stop_unit[-1]
    share = jnp.maximum(-(-total // num_workers), LEAST_SHARE)
    worker = jnp.arange(num_workers, dtype=jnp.int32)
    start = jnp.minimum(worker * share, total)
    stop = jnp.minimum(start + share, total)
    first_tile = jnp.searchsorted(stop_unit, start, side="right", method="compare_all").astype(jnp.int32)
    stop_tile = jnp.searchsorted(first_unit, stop, side="left", method="compare_all").astype(jnp.int32)
    stop_tile = jnp.where(start < stop, stop_tile, first_tile)
    first_worker = first_unit // share
    num_pieces = jnp.where(num_units > 0, (stop_unit - 1) // share - first_worker + 1, 0)
    first_piece = jnp.cumsum(num_pieces, dtype=jnp.int32) - num_pieces
    table = jnp.stack([*tiles, first_unit, first_piece - first_worker], 1)
    return Work(table, jnp.stack([first_tile, stop_tile, start, stop], 1), first_piece, num_pieces)


def _units(tiles: Tiles) -> tuple[Array, Array]:
    num_units = tiles.stop - tiles.start
    return num_units, jnp.cumsum(num_units, dtype=jnp.int32) - num_units


class Tile(NamedTuple):
    """A worker's part of a tile, as scalars: its row of `Work.tiles`, with blocks limited to the worker's units."""

    q_batch: Array
    q_row: Array
    kv: Array
    kv_tokens: Array
    start: Array
    full_start: Array
    full_stop: Array
    stop: Array
    piece: Array
    number: Array

    @classmethod
    def of(cls, tiles: Any, number: Array, worker: Array, first_unit: Array, stop_unit: Array) -> "Tile":
        # + 0 drops the mesh axes from the types, as loop bounds must not vary over them.
        *fields, unit, piece = (tiles[number, i] + 0 for i in range(10))
        q_batch, q_row, kv, kv_tokens, start, full_start, full_stop, stop = fields
        first = start + jnp.maximum(first_unit - unit, 0)
        stop = jnp.minimum(start + (stop_unit - unit), stop)
        full_start = jnp.clip(full_start, first, stop)
        full_stop = jnp.clip(full_stop, full_start, stop)
        return cls(q_batch, q_row, kv, kv_tokens, first, full_start, full_stop, stop, piece + worker, number)

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
