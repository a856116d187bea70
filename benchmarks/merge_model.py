"""Predicts how long the merge kernel takes on an H100, from its machine code and from a call's own tables.

    python -m benchmarks.merge_model 'llama3-*/decode@*'

Nothing was measured. The instruction counts are those of its SASS (ptxas 13.0, H = 128; `make test-all` bounds them);
latencies, the clock and the cost of an empty kernel are estimates, so a prediction is an interval.
"""

import math
import sys
from typing import NamedTuple

import numpy as np

from benchmarks.kernel_plan import MULTIPROCESSORS, plan_of
from benchmarks.kernel_shapes import AttentionShape, select
from longctx.kernels.mosaic_gpu.merge import RESIDENT, MergeConfig

CLOCK = 1.755e9
BANDWIDTH = 3.0e12  # of HBM; pieces are mostly still in L2, which is faster
EMPTY_KERNEL = 1.0e-6  # between two kernels of a CUDA graph
# Optimistic and pessimistic: cycles of a read from L2, and cycles an instruction of a warp alone on its scheduler.
LATENCY = (300, 600)
CYCLES_ALONE = (1.2, 2.0)
# Instructions of a warp for each piece: of the first group of a row, of others, and of the last to be absorbed.
FIRST, LATER, LAST = 9, 10.5, 6.5
ROW = 60  # instructions besides, to find a row and to store its results


class Merge(NamedTuple):
    """A call of the kernel, and the time that it is predicted to take."""

    rows: int
    pieces: int  # of the row that has most
    bytes: int
    seconds: tuple[float, float]  # optimistic and pessimistic


def predict_merge(shape: AttentionShape) -> Merge | None:
    """The prediction for a named shape; None: its items are whole, and nothing is merged."""
    plan = plan_of(shape)
    if plan.work.pieces is None:
        return None
    rows = shape.batch * shape.q_length * shape.heads
    config = MergeConfig.choose(rows, shape.heads, shape.head_size)
    place, (block_q, group) = np.asarray(plan.place), (plan.rows[0].shape[1], plan.place.shape[1])
    by_head = np.asarray(plan.work.pieces[:, 1]).reshape(shape.heads // group, -1)
    pieces = by_head[:, place // block_q]  # of each row
    moved = int(pieces.sum()) * (shape.head_size + 1) * 4 + rows * (shape.head_size * 2 + 4)
    cycles = [_cycles(config, rows, pieces, *guess) for guess in zip(LATENCY, CYCLES_ALONE, strict=True)]
    low, high = (EMPTY_KERNEL + max(c / CLOCK, moved / BANDWIDTH) for c in cycles)
    return Merge(rows, int(pieces.max()), moved, (low, high))


def _cycles(config: MergeConfig, rows: int, pieces: np.ndarray, latency: float, alone: float) -> float:
    """Of the thread block that takes longest."""
    resident = min(RESIDENT, math.ceil(config.num_blocks / MULTIPROCESSORS))
    instruction = max(alone, resident)  # each scheduler has one warp of each thread block
    # One row at a time may be the one with most pieces; of many rows together the mean counts.
    number = pieces.max() if config.num_rows == 1 else pieces.mean()
    later = max(0, math.ceil(number / config.num_loads) - 1)
    loads = LATER * config.num_loads * instruction
    of_row = later * max(loads, latency + 0.4 * loads) + (LAST * config.num_loads + ROW) * instruction
    # A row's place, its pieces and the first of them are found one after the other.
    at_once = 3 * latency + FIRST * config.num_loads * config.num_rows * instruction + config.num_rows * of_row
    rounds = math.ceil(rows / config.num_rows / config.num_blocks)
    waves = math.ceil(config.num_blocks / (RESIDENT * MULTIPROCESSORS))
    return rounds * waves * at_once


def main(patterns: list[str]) -> None:
    print(f"{'shape':<34}{'rows':>8}{'pieces':>8}{'MB':>8}{'predicted us':>16}")
    for shape in (shape for pattern in patterns or ["*/decode@*"] for shape in select(pattern)):
        found = predict_merge(shape)
        if found is None:
            print(f"{shape.name:<34}{'whole: nothing to merge':>40}")
        else:
            low, high = (seconds * 1e6 for seconds in found.seconds)
            print(f"{shape.name:<34}{found.rows:>8}{found.pieces:>8}{found.bytes / 1e6:>8.1f}{low:>10.1f} - {high:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
