"""Tile sizes of the Triton kernels, and the pieces of a head size that is no power of two."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

# The smallest side of a tile that tensor cores multiply.
SMALLEST = 16
# Of keys and of values: that of multi-head latent attention, and for float32.
LARGEST_HEAD, LARGEST_FLOAT32_HEAD = 576, 256
LARGEST_HEAD_OF_PAGES = 256


# By the most columns that keys and values have together, (block_q, block_kv) for 16-bit operands. They were chosen so
# that no GPU since Ampere spills registers, and two stages fit into the 99 KiB of shared memory of the smallest.
_FORWARD = {128: (128, 64), 256: (128, 64), 320: (128, 32), 512: (64, 32), math.inf: (32, 16)}
# Likewise by `_pressure`, (block_q, block_kv, num_warps) of the kernels of d_q, and of d_k and d_v.
_BACKWARD = {
    128: ((64, 64, 4), (64, 64, 4)),
    256: ((64, 64, 8), (64, 64, 8)),
    320: ((64, 32, 8), (32, 64, 8)),
    512: ((64, 16, 8), (16, 32, 8)),
    math.inf: ((16, 16, 8), (16, 16, 8)),
}
_FLOAT32_BACKWARD = {
    128: ((32, 32, 4), (32, 32, 4)),
    256: ((16, 16, 4), (16, 16, 4)),
    320: ((16, 16, 4), (16, 16, 4)),
    math.inf: ((16, 16, 8), (16, 16, 8)),
}


class Piece(NamedTuple):
    """Columns `[start, start + size)` of a head, of which those from `limit` on do not exist.

    The size is a power of two, as Triton asks of every array.
    """

    start: int
    size: int
    limit: int

    @property
    def is_whole(self) -> bool:
        return self.start + self.size <= self.limit

    def columns(self) -> Array:
        """The numbers of the columns, int32 `[size]`."""
        return self.start + lax.iota(jnp.int32, self.size)


def pieces_of(head_size: int) -> tuple[Piece, ...]:
    """Divide a head size into few powers of two, with little beyond its end: 192 is 128 and 64, and 576 512 and 64.

    Examples:
      >>> [piece.size for piece in pieces_of(80)], [piece.size for piece in pieces_of(120)]
      ([64, 16], [128])
    """
    found: list[Piece] = []
    start = 0
    while start < head_size:
        rest = head_size - start
        above = _side_over(rest)
        size = above if 4 * rest > 3 * above or above == SMALLEST else above // 2
        found.append(Piece(start, size, head_size))
        start += size
    return tuple(found)


def padded(head_size: int) -> int:
    """The columns that the pieces of a head size have."""
    return sum(piece.size for piece in pieces_of(head_size))


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Static sizes of one kernel.

    Args:
      block_q: rows of a tile of queries, a power of two from 16 on.
      block_kv: keys of a block, likewise.
      num_warps: warps of a thread block.
      num_stages: blocks of operands that are in flight to shared memory (cp.async).
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    @classmethod
    def forward(cls, head_size: int, value_size: int, dtype: DTypeLike, num_rows: int) -> "TileConfig":
        """The configuration of the forward kernel for `num_rows` rows of one KV head."""
        columns = padded(head_size) + padded(value_size)
        if jnp.dtype(dtype).itemsize == 4:
            block_q, block_kv = (32, 32) if _pressure(head_size, value_size) <= 256 else (16, 16)
            return cls(min(block_q, _side_over(num_rows)), block_kv, num_warps=8, num_stages=2)
        block_q, block_kv = next(sizes for most, sizes in _FORWARD.items() if columns <= most)
        block_q = min(block_q, _side_over(num_rows))
        # Fewer warps read keys and values less often from shared memory, where a thread has registers for their rows.
        is_small = block_q * columns <= 64 * 256 and columns <= 512
        num_warps = 4 if is_small and (block_q < 128 or _is_whole(head_size, value_size)) else 8
        return cls(block_q, block_kv, num_warps, num_stages=3 if columns <= 128 else 2)

    @classmethod
    def backward(
        cls, head_size: int, value_size: int, dtype: DTypeLike, num_rows: int, from_keys: bool
    ) -> "TileConfig":
        """The configuration of the kernel of d_q, or from keys of that of d_k and d_v."""
        table = _FLOAT32_BACKWARD if jnp.dtype(dtype).itemsize == 4 else _BACKWARD
        pressure = _pressure(head_size, value_size)
        of_queries, of_keys = next(sizes for most, sizes in table.items() if pressure <= most)
        block_q, block_kv, num_warps = of_keys if from_keys else of_queries
        return cls(min(block_q, _side_over(num_rows)), block_kv, num_warps, num_stages=2)

    @classmethod
    def paged(cls, head_size: int, dtype: DTypeLike, num_rows: int, is_fp8: bool) -> "TileConfig":
        """The configuration of the kernel over pages for `num_rows` rows of one KV head.

        They are the largest tiles for which a thread has enough registers (`tests/aot/paged_triton.py`).
        """
        columns = padded(head_size)
        block_q, block_kv, num_warps = 128, 32 if is_fp8 else 64, 4
        if jnp.dtype(dtype).itemsize == 4:
            block_q, block_kv, num_warps = (32, 32, 4) if columns <= 128 else (16, 16, 8)
        elif columns > 128:
            block_q, block_kv = 64 if columns == 256 else 32, 32
        block_q = min(block_q, _side_over(num_rows))
        if block_q * columns > 64 * 128:
            num_warps = 8
        return cls(block_q, block_kv, num_warps, num_stages=3)


def _is_whole(*head_sizes: int) -> bool:
    """Whether each head size is one piece without columns beyond its end."""
    return all(len(pieces_of(size)) == 1 and padded(size) == size for size in head_sizes)


def _pressure(*head_sizes: int) -> int:
    """The columns of head sizes, and for each further piece the columns whose registers it takes: for its pointers."""
    return sum(padded(size) + 64 * (len(pieces_of(size)) - 1) for size in head_sizes)


def power_over(x: int) -> int:
    """The smallest power of two that is no less than x."""
    return 1 << (x - 1).bit_length()


def _side_over(count: int) -> int:
    """The smallest side of a tile that has `count` rows or columns."""
    return max(SMALLEST, power_over(count))
