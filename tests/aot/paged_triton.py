"""Paged attention by Triton, compiled for the GPUs that it serves: tensor cores, asynchronous copies, no spills."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from h100 import gpu_mesh
from hlo import opcodes_of_size
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from triton_code import PRODUCTS, check_memory, compile_kernels

from longctx.kernels import explain, paged_attention, plan_paged_attention

PAGES, SEQUENCES, ENTRIES, KV_HEADS = 4096, 16, 256, 8


class Case(NamedTuple):
    kind: str
    head_size: int = 128
    rows: int = 16
    most: int | None = 1  # rows of a sequence
    dtype: str = "bfloat16"
    is_fp8: bool = False
    page_size: int = 16
    group: int = 4
    has_limits: bool = False  # first positions, and a cap

    def __str__(self) -> str:
        kind = "decodes" if self.most else "chunks"
        extra = "-fp8" * self.is_fp8 + "-limits" * self.has_limits
        return f"{self.kind}-{self.head_size}-{kind}-{self.dtype}{extra}"


DECODES = [
    Case("A100"),
    Case("RTX 4090"),
    Case("B200"),
    Case("H100", head_size=96),  # mosaic_gpu does not take it
    Case("H100", dtype="float32"),
    Case("A100", dtype="float32"),
    Case("A100", dtype="float16", is_fp8=True),
    Case("RTX 4090", is_fp8=True, page_size=64),
    Case("A100", head_size=16),
    Case("A100", head_size=64, group=8),
    Case("A100", head_size=80, page_size=48),
    Case("A100", head_size=192),
    Case("RTX 4090", head_size=256),
    Case("RTX 4090", head_size=256, dtype="float32"),
    Case("A100", has_limits=True),
]
CHUNKS = [case._replace(rows=512, most=None) for case in DECODES]


@pytest.mark.parametrize(
    "case", [DECODES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in [*DECODES[1:], *CHUNKS])], ids=str
)
def test_a_call_with_a_plan_is_two_kernels(case: Case, tmp_path: Path) -> None:
    """Attention reads the pages in place and at least 4 bytes a thread at a time; the other kernel merges pieces."""
    mesh = gpu_mesh(case.kind, context=1)
    there = NamedSharding(mesh, P())

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=there)

    itemsize = jnp.dtype(case.dtype).itemsize
    page_dtype = jnp.uint8 if case.is_fp8 else jnp.uint16 if itemsize == 2 else jnp.float32
    pages = array(page_dtype, PAGES, case.page_size, KV_HEADS, case.head_size)
    scales = (array(jnp.float32, PAGES, KV_HEADS, case.page_size),) * 2 if case.is_fp8 else ()
    q = array(case.dtype, case.rows, KV_HEADS * case.group, case.head_size)
    table, of_rows, of_sequences = (array(jnp.int32, *x) for x in ((SEQUENCES, ENTRIES), (case.rows,), (SEQUENCES,)))
    metadata = table, table, of_sequences, of_rows, of_rows
    limits = {"q_first": of_rows} if case.has_limits else {}
    cap = 30.0 if case.has_limits else None

    def make_plan(metadata: Any, limits: Any) -> Any:
        return plan_paged_attention(
            q.shape[1], pages, *metadata, q_dtype=q.dtype, max_rows_per_sequence=case.most, **limits
        )

    def attend(q: Any, pages: Any, scales: Any, metadata: Any, limits: Any, plan: Any) -> Any:
        named = dict(zip(("k_scale", "v_scale"), scales, strict=False))
        return paged_attention(q, pages, pages, *metadata, plan=plan, logits_soft_cap=cap, **named, **limits)

    with jax.set_mesh(mesh):
        assert explain(q, pages, paged=True).taken == "triton"
        plan = jax.eval_shape(make_plan, metadata, limits)
        plan = jax.tree.map(lambda x: array(x.dtype, *x.shape), plan)
        lowered = jax.jit(attend).lower(q, pages, scales, metadata, limits, plan)
    assert plan.implementation == "triton"
    compiled, kernels = compile_kernels(lowered, tmp_path, case.kind)
    entry = compiled.as_text().split("ENTRY")[1].splitlines()
    assert sum("custom-call(" in line for line in entry) == 2
    assert not [line for line in entry if re.search(r" (copy|transpose|slice|pad|convert|reduce)\(", line)]
    size = PAGES * case.page_size * KV_HEADS * case.head_size // 2
    assert opcodes_of_size(compiled.as_text(), size) <= {"parameter", "bitcast", "custom-call", "get-tuple-element"}

    attention = kernels["paged_attention"]
    assert len(re.findall(PRODUCTS[case.dtype], attention)) >= 4
    assert "cp.async.cg.shared.global" in attention or case.head_size % 64 or case.is_fp8
    assert "cp.async" in attention
    for ptx in (attention, kernels["merge_pieces"]):
        check_memory(ptx, case.kind)
