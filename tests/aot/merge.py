"""The kernel that merges pieces, compiled for an H100: how many loads are in flight, and instructions a piece."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from h100 import h100_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from machine_code import VERSIONS, MachineCode, check_any

from benchmarks import cuda_tools, merge_model, sass
from benchmarks.sass import Instruction
from longctx.kernels.mosaic_gpu.merge import merge_pieces

BLOCK_Q, HEADS, GROUP = 64, 32, 4


def compile_merge(num_tokens: int, head_size: int, dumped: Path) -> str:
    """Its PTX."""
    there = NamedSharding(h100_mesh(context=1), P())
    num_items = -(-num_tokens * GROUP // BLOCK_Q) * HEADS // GROUP
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((num_items + 132, BLOCK_Q, head_size), jnp.float32),
        ((num_items + 132, BLOCK_Q), jnp.float32),
        ((num_items, 2), jnp.int32),
        ((num_tokens, GROUP), jnp.int32),
    ]
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=there) for shape in shapes]
    with jax.set_mesh(there.mesh):
        jax.jit(lambda *x: merge_pieces(*x, HEADS, jnp.dtype("bfloat16"))).lower(*arguments).compile()
    (path,) = dumped.glob("*.ptx")
    return path.read_text()


def loads_before_use(instructions: Iterable[Instruction]) -> int:
    """The most loads that are issued one after the other before one of them is used."""
    most, pending = 0, set[str]()
    for x in instructions:
        registers, is_load = re.findall(r"\bR\d+\b", x.operands), x.family in ("LD", "LDG")
        if pending & set(registers[is_load:]):
            pending = set()
        if is_load:
            pending.add(registers[0])
            most = max(most, len(pending))
    return most


@pytest.mark.parametrize(
    ("num_tokens", "head_size", "in_flight"),
    [
        (1, 128, 32 * 2),  # for each piece one load of lse, and one or two of out
        pytest.param(1, 64, 16 * 3, marks=pytest.mark.slow),
        pytest.param(1, 256, 16 * 2, marks=pytest.mark.slow),
        pytest.param(16, 128, 8 * 2, marks=pytest.mark.slow),
        (1024, 128, 12),  # of 4 rows, each with 2 pieces
        pytest.param(1024, 64, 12, marks=pytest.mark.slow),
        pytest.param(1024, 256, 12, marks=pytest.mark.slow),
    ],
)
def test_pieces_are_read_together(
    num_tokens: int, head_size: int, in_flight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows many pieces of one; of many, two of each of four."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    jax.clear_caches()
    ptx = compile_merge(num_tokens, head_size, tmp_path)
    for version in VERSIONS:
        assembled = cuda_tools.assemble(ptx, version)
        program = sass.parse(assembled.sass)
        check_any(MachineCode(ptx, assembled, program))  # no spill
        assert loads_before_use(program.instructions) >= in_flight
        if num_tokens == 1 and head_size == 128:
            (loop,) = (loop for loop in program.loops if loop.count("LDG"))
            assert loop.count("LDG") == 64
            assert loads_before_use(loop.body) == 64
            assert len(loop.body) <= 32 * merge_model.LATER
            rest = len(program.instructions) - len(loop.body)
            assert rest <= 32 * (merge_model.FIRST + merge_model.LAST) + 2 * merge_model.ROW
        if num_tokens == 1024:
            assert assembled.registers * 128 * merge_model.RESIDENT <= 65536
