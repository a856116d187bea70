"""Thunks of a step compiled for GPUs, of which XLA writes the sequence into a folder: what a GPU runs, in its order.

As a program, `python thunks.py MODEL STAGE CONTEXT TENSOR SHARDED REPLICATED LOCAL [LEVEL]` compiles a step, or the
sampling after it at a level, with the flags of the environment, and prints how many bytes a step needs besides its
arguments. A process reads `XLA_FLAGS` once, so other flags take another process.
"""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from abstract_step import compile_sampling, compile_step, make_shape
from h100 import gpu_mesh

from longctx.models import LlamaConfig, RowwiseFp8
from longctx.parallel.topology import AXES
from longctx.serving.request.sampling_params import SamplingLevel

# With heads that the Mosaic GPU kernel takes.
CONFIG = LlamaConfig(1024, 512, 1024, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=128, max_positions=1 << 20)
_LINE = re.compile(r"^( *)\d+: k(\w+)")


class Thunk(NamedTuple):
    """A thunk that runs something itself, unlike a loop, a branch or a command buffer.

    Attributes:
      kind: such as `"CustomKernel"`, a kernel of XLA's, or `"CustomCall"`, one of Pallas'.
      within: kinds of the thunks that it is in, the outermost first.
    """

    kind: str
    within: tuple[str, ...]

    @property
    def is_captured(self) -> bool:
        return "CommandBuffer" in self.within


class Sequence(NamedTuple):
    """The thunks of a program.

    Attributes:
      outermost: kinds of the thunks that are in no other.
      leaves: all that have none in them, in order.
      hlo: the optimised module that they are of.
      temp: bytes that it needs besides its arguments.
    """

    outermost: list[str]
    leaves: list[Thunk]
    hlo: str = ""
    temp: int = 0


def thunks_of(
    folder: Path,
    sizes: tuple[int, int, int],
    rows: tuple[int, int, int],
    flags: str,
    level: SamplingLevel | None = None,
    model: str = "small",
) -> Sequence:
    """The thunks of a step on a mesh, or of the sampling after it, compiled with some flags in another process.

    Args:
      model: `CONFIG`, or the name of a preset; with `-fp8` behind it, its feed-forward is quantised. With `@A100`
        behind that, it is compiled for that GPU, not for H100s.
    """
    module = "jit_step" if level is None else "jit_sample_step"
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={module}"
    command = [sys.executable, __file__, model, *map(str, (*sizes, *rows)), *([] if level is None else [level.name])]
    environment = os.environ | {"XLA_FLAGS": f"{flags} {dump}", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (file,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
    (module,) = folder.glob("*_gpu_after_optimizations.txt")
    return parse(file.read_text())._replace(hlo=module.read_text(), temp=int(result.stdout or 0))


def parse(text: str) -> Sequence:
    """Parse the sequence as XLA writes it, with what is in a thunk indented below it."""
    lines = [(len(match[1]), match[2]) for match in map(_LINE.match, text.splitlines()) if match]

    def walk() -> Iterator[tuple[str, tuple[str, ...], bool]]:
        above: list[tuple[int, str]] = []
        for at, (indent, kind) in enumerate(lines):
            while above and above[-1][0] >= indent:
                above.pop()
            yield kind, tuple(name for _, name in above), at + 1 == len(lines) or lines[at + 1][0] <= indent
            above.append((indent, kind))

    found = [*walk()]
    return Sequence(
        [kind for kind, within, _ in found if not within],
        [Thunk(kind, within) for kind, within, is_leaf in found if is_leaf],
    )


def main() -> None:
    name, _, kind = sys.argv[1].partition("@")
    name, is_fp8 = name.removesuffix("-fp8"), name.endswith("-fp8")
    config = CONFIG if name == "small" else LlamaConfig.preset(name)
    if is_fp8:
        config = dataclasses.replace(config, quantization=RowwiseFp8.of(config.num_layers))
    *sizes, sharded, replicated, local = map(int, sys.argv[2:8])
    mesh, rows = gpu_mesh(kind or "H100", **dict(zip(AXES, sizes, strict=True))), (sharded, replicated, local)
    # On one device no `jax.shard_map` gives the kernels their mesh.
    with jax.set_mesh(mesh) if mesh.size == 1 else contextlib.nullcontext():
        shape = make_shape(mesh, rows)
        if sys.argv[8:]:
            compile_sampling(mesh, shape, jnp.bfloat16, config, [SamplingLevel[sys.argv[8]]])
        else:
            compiled = compile_step(mesh, shape, jnp.bfloat16, config, sections=rows)
            print(compiled.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main()
