"""Sizes of the kernel: what registers and shared memory (227 KiB) of a Hopper multiprocessor hold."""

import dataclasses

# What a warpgroup multiplies at a time.
WARPGROUP_ROWS = 64
# Keys of a block and blocks in flight, by head size.
_BLOCKS = {64: (128, 4), 128: (128, 2), 256: (64, 2)}
HEAD_SIZES = tuple(_BLOCKS)


@dataclasses.dataclass(frozen=True)
class Cut:
    """Warpgroups that multiply, keys of a block, blocks in flight."""

    consumers: int
    block: int
    stages: int

    @property
    def rows(self) -> int:
        return self.consumers * WARPGROUP_ROWS

    @classmethod
    def of(cls, head_size: int, num_rows: int) -> "Cut":
        """For so many rows of one head."""
        consumers = 1 if num_rows <= WARPGROUP_ROWS else 2
        block, stages = _BLOCKS[head_size]
        return cls(consumers, block, stages + (consumers == 1 and head_size == 128))
