"""The converter warpgroup: it turns blocks of FP8 pages into the 16 bits that consumers multiply.

wgmma takes a second operand of 8 bits only where the summed dimension is contiguous: keys are such, values are not.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.mosaic_gpu.adapter import FP8_TILE, ROW_OF_FP8_TILE, broadcast, cast, read

# Rows and columns that are converted at a time, in registers: whole tiles of shared memory.
_ROWS, _COLUMNS = 64, 128


def convert_block(source: Any, scales: Any, to: Any) -> None:
    """Write `source * scales` to 16-bit shared memory, where products that begin later read it.

    The value of an element is its FP8 value times its row's scale in float32, rounded once.

    Args:
      source: FP8 values `[rows, H]`, in shared memory.
      scales: float32 `[rows]`, in shared memory.
      to: bfloat16 or float16 `[rows, H]`, in shared memory.
    """
    rows, head_size = source.shape
    for first in range(0, rows, _ROWS):
        own = pl.ds(first, _ROWS)
        scale = read(scales.at[own], ROW_OF_FP8_TILE)
        for column in range(0, head_size, _COLUMNS):
            part = (own, pl.ds(column, min(_COLUMNS, head_size)))
            x = cast(source.at[part][...], FP8_TILE).astype(jnp.float32)
            to.at[part][...] = (x * cast(broadcast(scale, x.shape, 0), FP8_TILE)).astype(to.dtype)
    plgpu.commit_smem()
