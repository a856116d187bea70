"""Products as compiled for GPUs without our kernels: 16-bit floats by tensor cores, float32 in float32."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from h100 import gpu_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention, paged_attention
from longctx.models.projections import project

KINDS = {"A100": "sm_80", "RTX 4090": "sm_89", "B200": "sm_100a"}
TOKENS, HEADS, KV_HEADS, SIZE = 2048, 32, 8, 128
ROWS, PAGE_SIZE, PAGES, SEQUENCES, ENTRIES = 16, 16, 1024, 4, 64


def prefill(dtype: Any) -> tuple[Callable[..., Any], list[Any]]:
    keys = ((TOKENS, KV_HEADS, SIZE), dtype)
    return lambda q, k, v: attention(q, k, v, implementation="xla")[0], [((TOKENS, HEADS, SIZE), dtype), keys, keys]


def gradients(dtype: Any) -> tuple[Callable[..., Any], list[Any]]:
    forward, arguments = prefill(dtype)
    return jax.grad(lambda *x: jnp.sum(forward(*x).astype(jnp.float32)), (0, 1, 2)), arguments


def paged(dtype: Any) -> tuple[Callable[..., Any], list[Any]]:
    def forward(q, k, v, table, lengths, positions, sequence):  # type: ignore[no-untyped-def]
        return paged_attention(q, k, v, table, table, lengths, positions, sequence, implementation="xla")[0]

    pages = ((PAGES, PAGE_SIZE, KV_HEADS, SIZE), dtype)
    of_sequences, of_rows = ((SEQUENCES,), jnp.int32), ((ROWS,), jnp.int32)
    table = ((SEQUENCES, ENTRIES), jnp.int32)
    return forward, [((ROWS, HEADS, SIZE), dtype), pages, pages, table, of_sequences, of_rows, of_rows]


def projection(dtype: Any) -> tuple[Callable[..., Any], list[Any]]:
    return project, [((64, 4096), dtype), ((4096, 1024), dtype)]


def products(case: Callable[..., Any], kind: str, dtype: Any, folder: Path) -> dict[str, str]:
    """The PTX of the kernels of products, by name. All products of the program are in one of them."""
    mesh, (function, arguments) = gpu_mesh(kind, context=1), case(jnp.dtype(dtype))
    there = NamedSharding(mesh, P())
    abstract = [jax.ShapeDtypeStruct(*x, sharding=there) for x in arguments]
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(*abstract)
        text = lowered.compile({"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}).as_text()
    found = {}
    for path in folder.glob("*.ptx"):
        ptx = path.read_text()
        for kernel in re.split(r"(?=\.visible \.entry)", ptx)[1:]:
            assert f".target {KINDS[kind]}" in ptx
            found[re.search(r"\.entry (\w+)", kernel)[1]] = kernel  # type: ignore[index]
    gemms = {name: kernel for name, kernel in found.items() if name.startswith("gemm_fusion")}
    # Kernels with equal code are emitted once.
    assert 0 < len(gemms) <= len(re.findall(r" dot\(", text)) == text.count("__triton_nested_gemm_fusion")
    return gemms


FEW = [(prefill, "A100"), (projection, "RTX 4090"), (prefill, "B200")]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, marks=() if (case, kind) in FEW else pytest.mark.slow)
        for case in (prefill, projection, paged, gradients)
        for kind in KINDS
    ],
)
def test_tensor_cores_multiply_16_bit_floats(case: Callable[..., Any], kind: str, tmp_path: Path) -> None:
    for name, kernel in products(case, kind, "bfloat16", tmp_path).items():
        assert "f32.bf16.bf16.f32" in kernel, f"{name} has no mma of bfloat16 that sums in float32"
        assert kernel.count("fma.rn.f32") < 32, f"{name} multiplies in float32"


@pytest.mark.slow
@pytest.mark.parametrize("case", [prefill, paged])
def test_float16_too(case: Callable[..., Any], tmp_path: Path) -> None:
    for kernel in products(case, "A100", "float16", tmp_path).values():
        assert "f32.f16.f16.f32" in kernel


@pytest.mark.slow
@pytest.mark.parametrize("case", [prefill, paged, gradients, projection])
def test_float32_stays_float32(case: Callable[..., Any], tmp_path: Path) -> None:
    """No TF32, which has 10 bits of mantissa."""
    for kernel in products(case, "A100", "float32", tmp_path).values():
        assert "mma" not in kernel
        assert kernel.count("fma.rn.f32") >= 64
