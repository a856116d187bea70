"""Predicts the time of attention on an H100 from its machine code: `python -m benchmarks.kernels --model`.

A multiprocessor takes what `warp_model` counts for the items and blocks that the kernel's own tables give it; the last
to end counts. Memory moves each byte once. The larger of the two, the kernel that merges pieces (`merge_model`, its
pessimistic end), and the start of a kernel make the time. Nothing is fitted to a shape: of the three constants below
one is fitted, once, and two are assumed.

Not in it: the second-level cache's bandwidth, pages, the small XLA operations round a call, and the clock's dependence
on what the products' operands are.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from benchmarks import cuda_tools, kernel_ptx, sass
from benchmarks.h100_limits import BYTES_PER_SECOND, floor
from benchmarks.kernel_plan import MULTIPROCESSORS, plan_of
from benchmarks.kernel_shapes import AttentionShape
from benchmarks.merge_model import predict_merge
from benchmarks.sass import Program
from benchmarks.warp_model import ItemCost, Turns, item_cost
from longctx.kernels.attention.mosaic_gpu import MosaicGpuPlan
from longctx.kernels.mosaic_gpu.tile_config import WARPGROUP_ROWS
from longctx.kernels.work import Tile

# Calibrated, with one figure: so that JAX's own kernel takes what FlashAttention-3 without its pipelining inside a
# warpgroup does, which is the same algorithm (Shah et al. 2024, table 2: 582 TFLOP/s). It stands for the clock under
# such a load, 1.83 GHz at most, and for all that the model leaves out.
CLOCK = 1.291e9
# Assumed: the part of the memory's bandwidth that can be had, and the start and end of a kernel in a CUDA graph.
MEMORY_SHARE = 0.92
KERNEL_SECONDS = 2e-6

# JAX's own kernel meets the other consumer at each turn; `attention_mgpu.py`, kv_loop.
_PEER_TURNS = Turns((0, 2), (0, 2), (-1, 1))


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one call, and which of its parts binds."""

    shape: AttentionShape
    compute: float
    memory: float
    merge: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory) + self.merge + KERNEL_SECONDS

    @property
    def binds(self) -> str:
        return "multiprocessors" if self.compute > self.memory else "memory"

    @property
    def row(self) -> dict[str, object]:
        """As `floor_table` shows it."""
        return {
            "predicted_ms": self.seconds * 1e3,
            "predicted_tflops": self.shape.flops / self.seconds / 1e12,
            "predicted_tbps": self.shape.bytes / self.seconds / 1e12,
            "predicted_of_floor": floor(self.shape.flops, self.shape.bytes).ms / 1e3 / self.seconds,
            "predicted_merge_ms": self.merge * 1e3,
            "predicted_binds": self.binds,
        }


def kind_of(plan: MosaicGpuPlan) -> tuple[int, bool]:
    """What the compiled kernels depend on, of those of one head size: rows of a tile, and whether there are pieces."""
    return plan.rows[0].shape[1], plan.work.pieces is not None


def loads(plan: MosaicGpuPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each item that a worker takes: the worker, and how many blocks its two loops take beside the last one."""
    first, stop, *units = np.asarray(plan.work.workers).T
    worker = np.repeat(np.arange(len(first)), stop - first)
    position = np.concatenate([np.arange(*x) for x in zip(first, stop, strict=True)])
    of_workers = (position.astype(np.int32), worker.astype(np.int32), *(x[worker] for x in units))
    items = jax.vmap(lambda *x: Tile.of(plan.work.tiles, plan.work.items, *x))(*of_workers)
    blocks, full = np.asarray(items.num_blocks), np.asarray(items.num_full)
    full = np.minimum(full, blocks - 1)
    return worker[blocks > 0], full[blocks > 0], (blocks - 1 - full)[blocks > 0]


def predict(shape: AttentionShape, item: ItemCost) -> Prediction:
    """The prediction for a shape whose kernel has these costs."""
    plan = plan_of(shape)
    worker, full, masked = loads(plan)
    cycles = np.bincount(worker, item.of(full, masked), minlength=MULTIPROCESSORS)
    memory = shape.bytes / (MEMORY_SHARE * BYTES_PER_SECOND)
    merge = predict_merge(shape)
    return Prediction(shape, float(cycles.max()) / CLOCK, memory, 0.0 if merge is None else merge.seconds[1])


def _program(ptx: str) -> Program:
    return sass.parse(cuda_tools.assemble(ptx, cuda_tools.NEWEST).sass)


def missing() -> str:
    """What predictions need and is not here; empty if nothing is."""
    if not kernel_ptx.PLUGIN.is_dir():
        return "the CUDA plugin (`make .venv/installed-aot`)"
    return "ptxas and nvdisasm (`make .venv/installed-ptxas`)" if cuda_tools.missing() else ""


def predict_all(shapes: Sequence[AttentionShape]) -> list[Prediction]:
    """Predictions of shapes with one head size: it compiles one kernel of each kind.

    Raises:
      RuntimeError: a tool failed.
    """
    kinds = {shape.name: kind_of(plan_of(shape)) for shape in shapes}
    examples = {kind: name for name, kind in reversed(kinds.items())}
    with tempfile.TemporaryDirectory() as folder:
        ptx = kernel_ptx.compile_ptx(list(examples.values()), Path(folder))
    costs = {kind: item_cost(_program(ptx[x]["attention"]), kind[0] // WARPGROUP_ROWS) for kind, x in examples.items()}
    return [predict(shape, costs[kinds[shape.name]]) for shape in shapes]


def ablation() -> tuple[float, float]:
    """FLOP/s of JAX's kernel and of ours at the shape of FlashAttention-3's ablation, which has no mask.

    The clock is calibrated with the first; the second is a check.
    """
    shape, ours = kernel_ptx.ABLATION, "mha/tp1/prefill@16k"
    with tempfile.TemporaryDirectory() as folder:
        ptx = kernel_ptx.compile_ptx([kernel_ptx.PEER, ours], Path(folder))
    (peer,) = ptx[kernel_ptx.PEER].values()
    # Tiles have 128 rows, blocks 128 keys. The last block of ours is beside its loops.
    tiles, blocks = shape.batch * shape.heads * shape.q_length // 128, shape.kv_length // 128
    of_peer = item_cost(_program(peer), 2, _PEER_TURNS).of(blocks, 0)
    of_ours = item_cost(_program(ptx[ours]["attention"]), 2).of(blocks - 1, 0)
    flops = 4 * shape.head_size * shape.batch * shape.heads * shape.q_length * shape.kv_length
    rounds = -(-tiles // MULTIPROCESSORS)
    peer_rate, our_rate = (flops / (rounds * cycles / CLOCK + KERNEL_SECONDS) for cycles in (of_peer, of_ours))
    return peer_rate, our_rate
