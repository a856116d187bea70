"""Triton kernels as compiled for a GPU that is not here: their PTX, and what the assembler says of it."""

import re
from pathlib import Path
from typing import Any

from machine_code import VERSIONS

from benchmarks import cuda_tools

TARGETS = {"A100": "sm_80", "RTX 4090": "sm_89", "H100": "sm_90a", "B200": "sm_100a"}
# Products of 16-bit floats, and of float32 by TF32, that sum in float32: of a warp, of a warpgroup, of a thread block.
PRODUCTS = {
    "bfloat16": r"mma\S*\.f32\.bf16\.bf16|tcgen05\.mma\S*\.kind::f16",
    "float16": r"mma\S*\.f32\.f16\.f16|tcgen05\.mma\S*\.kind::f16",
    "float32": r"mma\S*\.f32\.tf32\.tf32|tcgen05\.mma\S*\.kind::tf32",
}


def compile_kernels(lowered: Any, folder: Path, kind: str) -> tuple[Any, dict[str, str]]:
    """Compile a program; return it, and the PTX of each of its kernels by name. `kind` is one of `TARGETS`."""
    compiled = lowered.compile({"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"})
    found = {}
    for path in folder.glob("*.ptx"):
        ptx = path.read_text()
        for name in re.findall(r"\.entry (\w+)", ptx):
            assert f".target {TARGETS[kind]}" in ptx
            assert ptx.count(".entry") == 1, "the assembler reports each kernel of a file"
            found[name] = ptx
    return compiled, found


def check_memory(ptx: str, kind: str, most: float = 0) -> None:
    """Check that a kernel has no array in local memory, and at most so many bytes of spilled registers."""
    assert ".local" not in ptx
    for version in VERSIONS:
        assembled = cuda_tools.assemble(ptx, version, TARGETS[kind])
        assert assembled.spilled_bytes <= most, f"ptxas {version}: {assembled.report}"
