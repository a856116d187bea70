"""What a TMA copy into tiled shared memory delivers, in numpy, by the rule by which Mosaic issues it.

Mosaic makes the tiling part of the tensor map (`TileTransform` in jax/experimental/mosaic/gpu/launch_context.py): rows
and columns become tiles and positions within a tile, four dimensions. The copied box covers whole tiles, and its start
is split in the same way, `row -> (row // 8, row % 8)`. TMA compares every dimension with its own bound and writes zeros
for what is beyond one. So of a start within a tile, all positions from `8 - start % 8` on arrive as zeros, where a copy
that knew of rows would have carried to the next tile. The interpreter copies rows, so it can't show this.
"""

import functools

import numpy as np

MAX_BOX = 256  # elements along one dimension of a box


def tile_of(head_size: int, itemsize: int) -> tuple[int, int]:
    """Rows and elements of a tile: 128 bytes, or a whole row."""
    return 8, min(128 // itemsize, head_size)


def tma_copy(x: np.ndarray, start: int, count: int, itemsize: int = 2) -> np.ndarray:
    """What arrives of rows [start, start + count) of x `[R, H]`, of elements of so many bytes: `[count, H]`.

    Raises:
      ValueError: Mosaic refuses to compile such a copy.
    """
    tile = tile_of(x.shape[1], itemsize)
    of_array = tuple(min(size, limit) for size, limit in zip(x.shape, tile, strict=True))
    if any(size % part for size, part in zip(x.shape, of_array, strict=True)):
        raise ValueError(f"array dimensions must be at most {tile}, or multiples of it, got {x.shape}")
    box = count // tile[0], x.shape[1] // tile[1], *tile
    if count % tile[0] or max(box) > MAX_BOX:
        raise ValueError(f"a copy must be of whole tiles, at most {MAX_BOX} of them, got {(count, x.shape[1])}")
    of_tiles = (n // part for n, part in zip(x.shape, of_array, strict=True))
    tiled = x.reshape([n for pair in zip(of_tiles, of_array, strict=True) for n in pair]).swapaxes(1, 2)
    coordinates = start // tile[0], 0, start % tile[0], 0
    indices = [first + np.arange(size) for first, size in zip(coordinates, box, strict=True)]
    within = [(at >= 0) & (at < size) for at, size in zip(indices, tiled.shape, strict=True)]
    box_values = tiled[np.ix_(*(np.where(here, at, 0) for at, here in zip(indices, within, strict=True)))]
    arrived = np.where(functools.reduce(np.logical_and.outer, within), box_values, 0)
    return arrived.swapaxes(1, 2).reshape(count, x.shape[1])
