"""Predicts a decode step over pages by the Triton kernel from its machine code: `python -m benchmarks.triton_decode`.

Nothing was measured. Memory moves each byte once, at a part of the data sheet's bandwidth. A multiprocessor issues the
instructions of the loop without a mask for its share of the blocks, one for each scheduler and cycle, and its tensor
cores multiply. The optimistic figure hides the lesser of the two behind the greater, the pessimistic one adds them.

It compiles for a GPU that is not here, so PYTHONPATH must have the CUDA plugin (`.venv/aot`).
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import cuda_tools, sass
from benchmarks.h100 import TARGETS, gpu_mesh
from longctx.kernels import paged_attention, plan_paged_attention
from longctx.kernels.triton.tile_config import TileConfig
from longctx.models import LlamaConfig
from longctx.models.footprint import kv_row_bytes, weight_bytes

# Assumed: the part of the memory's bandwidth that can be had, and the start and end of a kernel in a CUDA graph.
MEMORY_SHARE = 0.92
KERNEL_SECONDS = 2e-6
# Kernels of a layer besides the two of attention: products, norms, rotary embedding, the write of pages.
OTHER_KERNELS = 12
SCHEDULERS = 4  # of a multiprocessor
PAGE_SIZE = 16


class Rates(NamedTuple):
    """A GPU's boost clock, Hz, and the cycles of a tensor core for one `mma.m16n8k16` that sums in float32."""

    clock: float
    product_cycles: int


RATES = {"A100": Rates(1.41e9, 8), "RTX 4090": Rates(2.52e9, 16)}


class Loop(NamedTuple):
    """The loop over blocks without a mask, for each warp: instructions, and products among them."""

    instructions: int
    products: int


class Prediction(NamedTuple):
    """Predicted seconds of a step, and of attention in one layer: optimistic and pessimistic."""

    step: tuple[float, float]
    attention: tuple[float, float]


def loop_of(ptx: str) -> Loop:
    """The loop without a mask of the attention kernel's PTX."""
    (architecture,) = re.findall(r"(?m)^\.target (\w+)", ptx)
    program = sass.parse(cuda_tools.assemble(ptx, cuda_tools.NEWEST, architecture).sass)
    loops = [loop for loop in program.loops if loop.families["HMMA"]]
    inner = [a for a in loops if not any(a is not b and a.start <= b.start and b.stop <= a.stop for b in loops)]
    # Blocks without a mask come first.
    first = min(inner, key=lambda loop: loop.start)
    return Loop(len(first.body), first.families["HMMA"])


def compile_decode(kind: str, config: LlamaConfig, batch: int, tokens: int, folder: Path) -> str:
    """The PTX of the attention kernel of a step in which each sequence of a batch decodes."""
    mesh = gpu_mesh(kind, context=1)
    there = NamedSharding(mesh, P())

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=there)

    entries = tokens // PAGE_SIZE
    q = array("bfloat16", batch, config.num_heads, config.head_dim)
    pages = array("uint16", batch * entries, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    metadata = array("int32", batch, entries), None, *(array("int32", batch),) * 3

    def attend(q: jax.Array, pages: jax.Array, *metadata: jax.Array) -> jax.Array:
        plan = plan_paged_attention(q.shape[1], pages, *metadata, q_dtype=q.dtype, max_rows_per_sequence=1)
        return paged_attention(q, pages, pages, *metadata, plan=plan)[0]

    with jax.set_mesh(mesh):
        lowered = jax.jit(attend).lower(q, pages, *metadata)
    lowered.compile({"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"})
    (ptx,) = (text for path in folder.glob("*.ptx") if ".entry paged_attention" in (text := path.read_text()))
    return ptx


def predict(kind: str, config: LlamaConfig, batch: int, tokens: int, loop: Loop) -> Prediction:
    """The prediction for one GPU with all of a model in bfloat16, each sequence of which has so many tokens."""
    target, rates = TARGETS[kind], RATES[kind]
    group = config.num_heads // config.num_kv_heads
    tiles = TileConfig.paged(config.head_dim, "bfloat16", group, is_fp8=False)
    bandwidth = MEMORY_SHARE * target.bandwidth * 1e9
    items = batch * config.num_kv_heads
    blocks = items * -(-tokens // tiles.block_kv)
    pieces = items + target.multiprocessors * 8 // tiles.num_warps
    moved = 2 * batch * tokens * config.num_kv_heads * kv_row_bytes(config.head_dim, 2)
    moved += 2 * 4 * pieces * tiles.block_q * (config.head_dim + 1)
    cycles = max(loop.instructions, loop.products * rates.product_cycles) * tiles.num_warps / SCHEDULERS
    memory, compute = moved / bandwidth, blocks / target.multiprocessors * cycles / rates.clock
    start = 2 * KERNEL_SECONDS
    attention = max(memory, compute) + start, memory + compute + start
    rest = weight_bytes(config) / bandwidth + config.num_layers * OTHER_KERNELS * KERNEL_SECONDS
    low, high = (config.num_layers * x + rest for x in attention)
    return Prediction((low, high), attention)


CASES = [("A100", "llama-3-8b", 64, 4096), ("A100", "llama-3-8b", 8, 32768), ("RTX 4090", "llama-3-8b", 8, 4096)]


def main(argv: Sequence[str]) -> int:
    print("| GPU | model | sequences x tokens | attention of a layer, ms | step, ms |\n|---|---|---|---|---|")
    for kind, model, batch, tokens in CASES:
        config = LlamaConfig.preset(model)
        with tempfile.TemporaryDirectory() as folder:
            loop = loop_of(compile_decode(kind, config, batch, tokens, Path(folder)))
        found = predict(kind, config, batch, tokens, loop)
        attention, step = (
            " to ".join(f"{1e3 * x:.{n}f}" for x in y) for y, n in ((found.attention, 3), (found.step, 1))
        )
        print(f"| {kind} | {model} | {batch} x {tokens} | {attention} | {step} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
