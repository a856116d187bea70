"""Tile sizes of the kernels, as the registers and shared memory (227 KiB) of a Hopper multiprocessor allow."""

import dataclasses
from typing import NamedTuple

# Rows that one warpgroup multiplies at a time.
WARPGROUP_ROWS = 64
# (block_kv, num_stages) of each head size.
_BLOCKS = {64: (128, 4), 128: (128, 3), 256: (64, 2)}
HEAD_SIZES = tuple(_BLOCKS)


class Registers(NamedTuple):
    """Registers of a thread once the warpgroups of a thread block have parted. All together have 65,536."""

    producer: int
    consumer: int


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Static sizes of one kernel.

    In a backward pass from keys the sides change places: `block_q` counts keys and `block_kv` queries.

    Args:
      block_q: rows of a tile, 64 or 128; one warpgroup computes 64 of them.
      block_kv: keys of a block.
      num_stages: blocks that are in flight to shared memory.
      registers: None if each warpgroup keeps what it starts with.
    """

    block_q: int
    block_kv: int
    num_stages: int
    registers: Registers | None = None

    @property
    def num_consumers(self) -> int:
        """Warpgroups that compute."""
        return self.block_q // WARPGROUP_ROWS

    @classmethod
    def choose(cls, head_size: int, num_rows: int) -> "TileConfig":
        """The configuration of the forward kernel for `num_rows` rows of one head."""
        block_q = WARPGROUP_ROWS if num_rows <= WARPGROUP_ROWS else 2 * WARPGROUP_ROWS
        # Of three warpgroups each starts with 168. Of two each has all that a thread can.
        registers = Registers(producer=40, consumer=232) if block_q > WARPGROUP_ROWS else None
        return cls(block_q, *_BLOCKS[head_size], registers)
