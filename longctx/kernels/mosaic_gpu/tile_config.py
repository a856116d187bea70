"""Tile sizes of the kernels, as the registers and shared memory (227 KiB) of a Hopper multiprocessor allow."""

import dataclasses
from typing import NamedTuple

# Rows that one warpgroup multiplies at a time.
WARPGROUP_ROWS = 64
# block_kv of each head size.
_BLOCK_KV = {64: 128, 128: 128, 256: 64}
HEAD_SIZES = tuple(_BLOCK_KV)
# Stages take what rows leave of this many bytes (barriers take the rest), but more than 4 would gain nothing.
_OPERAND_BYTES, _MOST_STAGES = 224 * 1024, 4
# Of FP8 pages, (num_stages, num_fp8_stages): together they take as much.
_FP8_STAGES = {64: (4, 4), 128: (2, 2), 256: (2, 2)}


class Registers(NamedTuple):
    """Registers of a thread once the warpgroups of a thread block have parted. All together have 65,536."""

    producer: int
    consumer: int
    converter: int = 0


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Static sizes of one kernel.

    In a backward pass from keys the sides change places: `block_q` counts keys and `block_kv` queries.

    Args:
      block_q: rows of a tile, 64 or 128; one warpgroup computes 64 of them.
      block_kv: keys of a block.
      num_stages: blocks that are in flight to shared memory.
      registers: None if each warpgroup keeps what it starts with.
      num_fp8_stages: blocks of FP8 pages that are in flight to shared memory, and wait for a warpgroup that converts
        them to the `num_stages` others; 0: keys and values have 16 bits.
    """

    block_q: int
    block_kv: int
    num_stages: int
    registers: Registers | None = None
    num_fp8_stages: int = 0

    @property
    def num_consumers(self) -> int:
        """Warpgroups that compute."""
        return self.block_q // WARPGROUP_ROWS

    @classmethod
    def choose(cls, head_size: int, num_rows: int, fp8: bool = False) -> "TileConfig":
        """The configuration of the forward kernel for `num_rows` rows of one head, with FP8 pages or without."""
        block_kv = _BLOCK_KV[head_size]
        # Of three warpgroups each starts with 168. Of two each has all that a thread can. For two consumers and a
        # converter there are not enough.
        if fp8:
            num_stages, num_fp8_stages = _FP8_STAGES[head_size]
            registers = Registers(producer=40, consumer=240, converter=152)
            return cls(WARPGROUP_ROWS, block_kv, num_stages, registers, num_fp8_stages)
        block_q = WARPGROUP_ROWS if num_rows <= WARPGROUP_ROWS else 2 * WARPGROUP_ROWS
        rows_bytes, stage_bytes = (2 * n * head_size for n in (block_q, 2 * block_kv))
        num_stages = min(_MOST_STAGES, (_OPERAND_BYTES - rows_bytes) // stage_bytes)
        registers = None if block_q == WARPGROUP_ROWS else Registers(producer=40, consumer=232)
        return cls(block_q, block_kv, num_stages, registers)
