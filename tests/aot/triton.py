"""The Triton kernels of attention compiled for GPUs since Ampere: tensor cores, asynchronous copies, no spills."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from h100 import gpu_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from triton_code import PRODUCTS, TARGETS, check_memory, compile_kernels

from longctx.kernels import attention, explain
from longctx.kernels.triton.tile_config import pieces_of
from longctx.parallel import ring_pass_kv

# Head sizes of keys and values; rows of queries.
PREFILL, DECODE = 2048, 1
SIZES = [(16, 16), (24, 24), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
LATENT = (576, 512)  # of multi-head latent attention, in 16 bits


def kernels_of(kind: str, sizes: tuple[int, int], dtype: str, rows: int, folder: Path) -> dict[str, str]:
    """The PTX of the kernels of attention and its gradients, by name."""
    size, value_size = sizes
    mesh = gpu_mesh(kind, context=1)
    there = NamedSharding(mesh, P())
    q, k, v, positions, kv_positions = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=there)
        for shape, dtype in (
            ((rows, 8, size), jnp.dtype(dtype)),
            ((4099, 2, size), jnp.dtype(dtype)),
            ((4099, 2, value_size), jnp.dtype(dtype)),
            ((rows,), jnp.int32),
            ((4099,), jnp.int32),
        )
    )

    def loss(q: Any, k: Any, v: Any, positions: Any, kv_positions: Any) -> Any:
        named = "triton" if kind == "H100" else None
        masks = {"q_positions": positions, "kv_positions": kv_positions}
        return jnp.sum(attention(q, k, v, **masks, window=(3000, 0), implementation=named)[0].astype(jnp.float32))

    with jax.set_mesh(mesh):
        if kind != "H100":
            assert explain(q, k).taken == "triton"
        program = jax.jit(jax.grad(loss, (0, 1, 2)) if rows > 1 else loss).lower(q, k, v, positions, kv_positions)
        _, kernels = compile_kernels(program, folder, kind)
    return {name: ptx for name, ptx in kernels.items() if name.startswith("attention")}


def check(kind: str, sizes: tuple[int, int], dtype: str, rows: int, folder: Path) -> None:
    kernels = kernels_of(kind, sizes, dtype, rows, folder)
    forward, backward = {"attention_forward"}, {"attention_of_queries", "attention_of_keys"}
    assert set(kernels) == (forward | backward if rows > 1 else forward)
    most = spilled_at_most(kind, sizes, dtype)
    for name, ptx in kernels.items():
        assert re.search(PRODUCTS[dtype], ptx), name
        assert "cp.async" in ptx, name
        check_memory(ptx, kind, most)


def spilled_at_most(kind: str, sizes: tuple[int, int], dtype: str) -> float:
    """The bytes that a kernel may spill (docs/attention.md)."""
    pieces = max(len(pieces_of(size)) for size in sizes)
    if dtype == "float32" and (max(sizes) > 128 or pieces > 1):
        return math.inf  # three factors for each number of several pieces don't fit into registers
    return 64 if kind == "B200" and (pieces > 1 or sizes == (64, 64)) else 0


FEW = [("A100", (128, 128), "bfloat16", PREFILL), ("RTX 4090", (192, 128), "float16", DECODE)]


@pytest.mark.parametrize(("kind", "sizes", "dtype", "rows"), FEW)
def test_kernels(kind: str, sizes: tuple[int, int], dtype: str, rows: int, tmp_path: Path) -> None:
    check(kind, sizes, dtype, rows, tmp_path)


CASES = [
    *((kind, sizes, "bfloat16", PREFILL) for kind in TARGETS for sizes in (*SIZES, LATENT)),
    *(("A100", sizes, "float32", PREFILL) for sizes in SIZES),
    *(("RTX 4090", sizes, "bfloat16", DECODE) for sizes in (*SIZES, LATENT)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes", "dtype", "rows"), CASES, ids=str)
def test_every_head_size(kind: str, sizes: tuple[int, int], dtype: str, rows: int, tmp_path: Path) -> None:
    check(kind, sizes, dtype, rows, tmp_path)


@pytest.mark.slow
def test_a_ring_takes_the_kernels_by_itself() -> None:
    """Inside `shard_map` with checked types, on 4 A100s of which 2 share the heads, forward and backward."""
    mesh = gpu_mesh("A100", context=2, tensor=2)
    spec, of_tokens = P("context", "tensor"), P("context")

    def local(q: Any, k: Any, v: Any, positions: Any) -> Any:
        out, _ = ring_pass_kv(q, k, v, q_positions=positions, kv_positions=positions)
        return jnp.sum(out.astype(jnp.float32))[None, None]

    function = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec, of_tokens), out_specs=P("context", "tensor"))
    q, k, positions = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((4096, 8, 128), jnp.bfloat16, spec),
            ((4096, 2, 128), jnp.bfloat16, spec),
            ((4096,), jnp.int32, of_tokens),
        )
    )
    with jax.set_mesh(mesh):
        gradients = jax.grad(lambda *x: jnp.sum(function(*x)), (0, 1, 2))
        text = jax.jit(gradients).lower(q, k, k, positions).compile().as_text()
    for name in ("attention_forward", "attention_of_queries", "attention_of_keys"):
        assert text.count(name) >= 2, name
