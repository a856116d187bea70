"""Predicts the time of attention by the Triton kernel from its machine code: `python -m benchmarks.triton_model`.

A warp's instructions for a block of keys without a mask are counted by the unit that runs them, from the kernel as
assembled for a GPU. If units overlap perfectly, the busiest one takes the time; if the tensor cores never overlap with
the rest, it takes their sum. Memory moves each byte once. Nothing is fitted, nothing was measured: the figures are
predictions. Not in them: blocks with a mask, the latency of the first block, and the second-level cache.
"""

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import cuda_tools, sass
from benchmarks.h100 import TARGETS, gpu_mesh
from benchmarks.sass import Loop
from longctx.kernels import attention
from longctx.kernels.attention.triton import RowTiles
from longctx.kernels.triton.tile_config import TileConfig

# A multiprocessor has four parts, each of which issues an instruction a cycle.
_PARTS = 4


@dataclass(frozen=True)
class Gpu:
    """What the data sheet says of a multiprocessor's part: cycles of a warp's instruction, and the clock in Hz.

    Attributes:
      product: of mma.m16n8k16 with 16-bit factors and sums in float32.
      exponential: of MUFU.
      arithmetic: of float32 and of integers, which share lanes or do not.
    """

    architecture: str
    clock: float
    product: int
    exponential: int
    arithmetic: float


GPUS = {
    "A100": Gpu("sm_80", 1.41e9, product=8, exponential=8, arithmetic=2),
    "RTX 4090": Gpu("sm_89", 2.52e9, product=32, exponential=8, arithmetic=1),
}
_MEMORY_SHARE = 0.92  # as in `kernel_model`


@dataclass(frozen=True)
class Prediction:
    """Seconds of a causal prefill: with all units overlapping, and with the tensor cores apart from the rest."""

    least: float
    most: float
    memory: float
    flops: float

    @property
    def row(self) -> str:
        low, high = (self.flops / max(x, self.memory) / 1e12 for x in (self.most, self.least))
        times = [max(x, self.memory) * 1e3 for x in (self.least, self.most)]
        return f"{times[0]:.2f} to {times[1]:.2f} ms, {low:.0f} to {high:.0f} TFLOP/s"


def step_of(kind: str, tokens: int, heads: int, kv_heads: int, size: int) -> Loop:
    """The loop over blocks without a mask of the forward kernel in bfloat16."""
    mesh = gpu_mesh(kind, context=1)
    there = NamedSharding(mesh, P())
    q, k = (jax.ShapeDtypeStruct((tokens, n, size), jnp.bfloat16, sharding=there) for n in (heads, kv_heads))
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
        program = jax.jit(lambda q, k, v: attention(q, k, v, implementation="triton")).lower(q, k, k)
        program.compile({"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"})
        texts = [path.read_text() for path in Path(folder).glob("*.ptx")]
    (ptx,) = [text for text in texts if ".entry attention_forward" in text]
    header, *entries = re.split(r"(?=\.visible \.entry)", ptx)
    (entry,) = [x for x in entries if ".entry attention_forward" in x]
    code = cuda_tools.assemble(header + entry, cuda_tools.OLDEST, GPUS[kind].architecture)
    loops = [loop for loop in sass.parse(code.sass).loops if loop.count("HMMA")]
    # The loop with a mask compares, and so is longer.
    return min(loops, key=lambda loop: len(loop.body))


def predict(kind: str, tokens: int, heads: int, kv_heads: int, size: int) -> Prediction:
    gpu, target = GPUS[kind], TARGETS[kind]
    tiles = TileConfig.forward(size, size, jnp.bfloat16, tokens * heads // kv_heads)
    loop = step_of(kind, tokens, heads, kv_heads, size)
    products, exponentials = loop.count("HMMA") * gpu.product, loop.count("MUFU") * gpu.exponential
    lanes = sum(x.family[:1] in "FI" or x.family in ("LOP3", "SEL", "PRMT") for x in loop.body) * gpu.arithmetic
    issued = len(loop.body)
    rest = max(exponentials, lanes, issued)
    cycles = [x * tiles.num_warps / _PARTS for x in (max(products, rest), products + rest)]
    rows = RowTiles.of(tokens, heads // kv_heads, tiles.block_q)
    # On average half of the keys are seen; tiles are many and long ones begin first, so that all end together.
    blocks = rows.num * rows.parts * kv_heads * tokens / 2 / tiles.block_kv / target.multiprocessors
    moved = 2 * tokens * size * 2 * (heads + kv_heads)
    return Prediction(
        least=blocks * cycles[0] / gpu.clock,
        most=blocks * cycles[1] / gpu.clock,
        memory=moved / (target.bandwidth * 1e9 * _MEMORY_SHARE),
        flops=2 * tokens * tokens * heads * size,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args(arguments)
    print("Predictions from machine code, not measurements: causal prefill, bfloat16, 32 query and 8 KV heads")
    for kind in GPUS:
        for size in (64, 128, 256):
            print(f"{kind:<10}H={size:<5}{predict(kind, options.tokens, 32, 8, size).row}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
