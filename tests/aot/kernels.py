"""The Hopper kernels as compiled for an H100: every named shape, no spills, no copies of keys, inside a mesh too."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from h100 import h100_mesh
from hlo import IN_PLACE, opcodes_of_size
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention, explain, paged_attention, write_pages
from longctx.kernels.shapes import SHAPES, AttentionShape
from longctx.parallel import ring_pass_kv, ring_pass_q

# One of each kind of tile, split and not, folded and not; the others are slow.
FEW = [
    "mha/tp1/prefill@16k",
    "llama3-8b/tp1/prefill@8k",
    "llama3-70b/tp8/chunk64@1m",
    "llama3-405b/tp4/chunk512@128k",
    "llama3-8b/tp1/decode@128k/b32",
]
NAMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in SHAPES]


@pytest.fixture
def dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    jax.clear_caches()
    return tmp_path


def compile_for_h100(function: Any, arguments: Any, donate: tuple[int, ...] = ()) -> Any:
    mesh = h100_mesh(context=1)
    there = NamedSharding(mesh, P())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments)
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def check_kernels(dumped: Path, spills: int = 0) -> None:
    """Products by wgmma and copies by TMA in the attention kernel; no spills, nothing serialised, in any."""
    reports = [path.read_text() for path in dumped.glob("*.ptxas")]
    for report in reports:
        assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= spills, report
        assert "serializ" not in report.lower()
    texts = [path.read_text() for path in dumped.glob("*.ptx")]
    attending = [text for text in texts if ".entry attention" in text]
    assert attending
    for text in attending:
        assert "wgmma.mma_async" in text
        assert "cp.async.bulk.tensor" in text


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def attend(shape: AttentionShape) -> tuple[Any, Any]:
    def function(q, k, v, q_positions, kv_positions):  # type: ignore[no-untyped-def]
        return attention(q, k, v, q_positions, kv_positions, implementation="mosaic_gpu")

    positions = array(jnp.int32, shape.q_length), array(jnp.int32, shape.kv_length)
    keys = array(jnp.bfloat16, *shape.kv_shape)
    return function, (array(jnp.bfloat16, *shape.q_shape), keys, keys, *positions)


@pytest.mark.parametrize("name", NAMES)
def test_named_shapes(name: str, dumped: Path) -> None:
    shape = SHAPES[name]
    compiled = compile_for_h100(*attend(shape))
    check_kernels(dumped)
    # Nothing of the size of the keys is made.
    size = shape.batch * shape.kv_length * shape.kv_heads * shape.head_size
    if shape.kind != "prefill":
        assert opcodes_of_size(compiled.as_text(), size) <= IN_PLACE - {"fusion"}


@pytest.mark.parametrize(
    ("head_size", "page_size"),
    [
        (64, 16),
        (128, 64),
        (256, 256),
        *(pytest.param(h, p, marks=pytest.mark.slow) for h, p in ((64, 64), (128, 8), (128, 16), (256, 16))),
    ],
)
def test_layers_over_pages_kept_as_bits(head_size: int, page_size: int, dumped: Path) -> None:
    """Written and read in place: several layers of a pool of pages, of whose size nothing is made."""
    layers, pages, rows, heads, kv_heads = 3, 2048, 64, 8, 1
    pool = array(jnp.uint16, layers * pages, page_size, kv_heads, head_size)

    def step(k_pages, v_pages, q, new, table, lengths, positions, sequence):  # type: ignore[no-untyped-def]
        def layer(carry, number):  # type: ignore[no-untyped-def]
            q, *cache = carry
            page = number * pages + table[sequence, positions // page_size]
            cache = write_pages(*cache, new, new, page, positions % page_size)
            out, _ = paged_attention(
                q, *cache, table, None, lengths, positions, sequence, number * pages, implementation="mosaic_gpu"
            )
            return (out, *cache), None

        return lax.scan(layer, (q, k_pages, v_pages), jnp.arange(layers, dtype=jnp.int32))[0]

    row = array(jnp.int32, rows)
    others = array(jnp.int32, 16, 512), array(jnp.int32, 16), row, row
    q, new = (array(jnp.bfloat16, rows, n, head_size) for n in (heads, kv_heads))
    compiled = compile_for_h100(step, (pool, pool, q, new, *others), donate=(0, 1))
    # A head size of 256 spills some registers in the step with a mask, pages of 8 where many copies are issued.
    check_kernels(dumped, spills=48 if head_size == 256 or page_size == 8 else 0)
    layer = pages * page_size * kv_heads * head_size
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 2 * layers * layer
    assert opcodes_of_size(compiled.as_text(), layers * layer) <= IN_PLACE | {"bitcast-convert"}


@pytest.mark.parametrize("ring", [ring_pass_kv, pytest.param(ring_pass_q, marks=pytest.mark.slow)])
def test_rings_take_the_kernel_by_themselves(ring: Any, dumped: Path) -> None:
    """Inside `shard_map` with checked types, on a mesh of 8; every hop calls it."""
    mesh = h100_mesh(context=8)

    def local(q, k, v, positions):  # type: ignore[no-untyped-def]
        assert explain(q, k).taken == "mosaic_gpu"
        return ring(q, k, v, q_positions=positions, kv_positions=positions)

    spec = P("context")
    function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    there = NamedSharding(mesh, spec)
    q, k, positions = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=there)
        for shape, dtype in (
            ((16384, 32, 128), jnp.bfloat16),
            ((16384, 8, 128), jnp.bfloat16),
            ((16384,), jnp.int32),
        )
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(q, k, k, positions).compile()
    check_kernels(dumped)
    assert compiled.as_text().count("mosaic_gpu") >= 8
