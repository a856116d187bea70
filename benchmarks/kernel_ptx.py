"""Compiles attention for an H100 where there is none, for its PTX: `python -m benchmarks.kernel_ptx FOLDER CASE...`.

It takes the CUDA plugin of `make .venv/installed-aot`. A case is a named shape, or `attention_mgpu`: JAX's own kernel,
at the shape of FlashAttention-3's ablation.
"""

import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import cuda_tools
from benchmarks.h100 import h100_mesh
from benchmarks.kernel_shapes import SHAPES, AttentionShape
from longctx.kernels import attention

PLUGIN = Path(sys.prefix, "aot")
PEER = "attention_mgpu"
# Shah et al. 2024, table 2: not causal.
ABLATION = AttentionShape("ablation", "mha", 1, "prefill", 4, 8448, 8448, 16, 16, 128)


def program_of(shape: AttentionShape) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """Our attention of a shape, whose positions are operands, and its arguments."""

    def function(q, k, v, q_positions, kv_positions):  # type: ignore[no-untyped-def]
        return attention(q, k, v, q_positions=q_positions, kv_positions=kv_positions, implementation="mosaic_gpu")

    kinds = (shape.q_shape, jnp.bfloat16), *((shape.kv_shape, jnp.bfloat16),) * 2
    positions = ((shape.q_length,), jnp.int32), ((shape.kv_length,), jnp.int32)
    return function, tuple(jax.ShapeDtypeStruct(*kind) for kind in (*kinds, *positions))


def _peer() -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    # It asks the CUDA runtime, which is not here, whether its ptxas is a broken one.
    attention_mgpu.cuda_versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: 13000)
    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2)
    x = jax.ShapeDtypeStruct(ABLATION.q_shape, jnp.float16)  # its scratch is float16 in jax 0.10
    return lambda q, k, v: attention_mgpu.attention(q, k, v, config), (x, x, x)


def _compile_here(folder: Path, case: str) -> None:
    """Write the PTX of a case's kernels into a folder. The process must have the plugin."""
    folder.mkdir(parents=True)
    os.environ |= {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    mesh = h100_mesh(context=1)
    function, arguments = _peer() if case == PEER else program_of(SHAPES[case])
    there = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        jax.jit(function).lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in arguments)).compile()


def compile_ptx(cases: Sequence[str], folder: Path) -> dict[str, dict[str, str]]:
    """The PTX of each case, by the names of its kernels ("attention", "merge_pieces").

    It compiles in another process, as JAX loads the plugin when it starts.

    Raises:
      RuntimeError: it can't be compiled; the message says why.
    """
    path = os.pathsep.join([str(cuda_tools.ptxas(cuda_tools.OLDEST).parent), os.environ.get("PATH", "")])
    modules = os.pathsep.join([str(PLUGIN), str(Path(__file__).parents[1])])
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": modules, "XLA_FLAGS": "", "PATH": path}
    command = [sys.executable, "-m", "benchmarks.kernel_ptx", str(folder), *cases]
    result = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or ["the compiler failed"])[-1])
    return {
        case: {file.stem.rpartition("_")[0]: file.read_text() for file in _folder(folder, case).glob("*.ptx")}
        for case in cases
    }


def _folder(folder: Path, case: str) -> Path:
    return folder / case.replace("/", "_")


def main(argv: Sequence[str]) -> int:
    folder, *cases = argv
    for case in cases:
        _compile_here(_folder(Path(folder), case), case)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
