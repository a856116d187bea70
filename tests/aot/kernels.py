"""The Mosaic GPU kernels compiled for an H100: every named shape, no spills, no copies of keys, inside a mesh too."""

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
from paged_step import computations_in_loops

from longctx.kernels import attention, explain, paged_attention, plan_paged_attention, write_pages
from longctx.kernels.shapes import SHAPES, AttentionShape
from longctx.parallel import ring_pass_kv, ring_pass_q

# One of each kind of tile, split and not, folded and not; the others are slow.
FEW = [
    "mha/tp1/prefill@16k",
    "llama3-70b/tp8/chunk64@1m",
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


def check_kernels(dumped: Path, entry: str = "attention") -> None:
    """Products by wgmma and copies by TMA in the attention kernel; no spills, nothing serialised, in any."""
    reports = [path.read_text() for path in dumped.glob("*.ptxas")]
    for report in reports:
        assert int(re.search(r"(\d+) bytes spill stores", report)[1]) == 0, report
        assert "serializ" not in report.lower()
    texts = [path.read_text() for path in dumped.glob("*.ptx")]
    attending = [text for text in texts if f".entry {entry}" in text]
    assert attending
    for text in attending:
        assert "wgmma.mma_async" in text
        assert "cp.async.bulk.tensor" in text


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def program_of(shape: AttentionShape) -> tuple[Any, Any]:
    def function(q, k, v, q_positions, kv_positions):  # type: ignore[no-untyped-def]
        return attention(q, k, v, q_positions, kv_positions, implementation="mosaic_gpu")

    positions = array(jnp.int32, shape.q_length), array(jnp.int32, shape.kv_length)
    keys = array(jnp.bfloat16, *shape.kv_shape)
    return function, (array(jnp.bfloat16, *shape.q_shape), keys, keys, *positions)


@pytest.mark.parametrize("name", NAMES)
def test_named_shapes(name: str, dumped: Path) -> None:
    shape = SHAPES[name]
    compiled = compile_for_h100(*program_of(shape))
    check_kernels(dumped)
    # Nothing of the size of the keys is made.
    size = shape.batch * shape.kv_length * shape.kv_heads * shape.head_size
    if shape.kind != "prefill":
        assert opcodes_of_size(compiled.as_text(), size) <= IN_PLACE - {"fusion"}


@pytest.mark.parametrize(
    ("head_size", "page_size", "is_fp8"),
    [
        (64, 16, False),
        (128, 64, False),
        (128, 64, True),
        *(pytest.param(h, p, False, marks=pytest.mark.slow) for h, p in ((256, 256), (64, 64), (128, 16), (256, 16))),
        *(pytest.param(h, p, True, marks=pytest.mark.slow) for h, p in ((256, 256), (64, 64), (128, 32), (256, 32))),
    ],
)
def test_layers_over_pages_kept_as_bits(head_size: int, page_size: int, is_fp8: bool, dumped: Path) -> None:
    """In a `shard_map` over KV heads: pages written and read in place, and planned once for all layers."""
    layers, pages, rows, ranks = 3, 2048, 64, 2
    mesh = h100_mesh(tensor=ranks)

    def step(cache, q, new, table, lengths, positions, sequence):  # type: ignore[no-untyped-def]
        metadata = (table, None, lengths, positions, sequence)
        plan = plan_paged_attention(q.shape[1], cache[0], *metadata)
        assert plan.implementation == "mosaic_gpu"

        def layer(carry, number):  # type: ignore[no-untyped-def]
            q, cache = carry
            page = number * pages + table[sequence, positions // page_size]
            cache = write_pages(*cache[:2], new, new, page, positions % page_size, *cache[2:])
            scales = dict(zip(("k_scale", "v_scale"), cache[2:], strict=False))
            out, _ = paged_attention(q, *cache[:2], *metadata, number * pages, plan=plan, **scales)
            return (out, cache), None

        return lax.scan(layer, (q, cache), jnp.arange(layers, dtype=jnp.int32))[0]

    def sharded(dtype: Any, spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    of_pool, of_scales, of_rows = P(None, None, "tensor"), P(None, "tensor"), P(None, "tensor")
    pool = sharded(jnp.uint8 if is_fp8 else jnp.uint16, of_pool, layers * pages, page_size, ranks, head_size)
    scales = sharded(jnp.float32, of_scales, layers * pages, ranks, page_size)
    cache, of_cache = ((pool, pool), (of_pool, of_pool))
    if is_fp8:
        cache, of_cache = (*cache, scales, scales), (*of_cache, of_scales, of_scales)
    q, new = (sharded(jnp.bfloat16, of_rows, rows, n * ranks, head_size) for n in (8, 1))
    others = [sharded(jnp.int32, P(), *shape) for shape in ((16, 512), (16,), (rows,), (rows,))]
    specs = (of_cache, of_rows, of_rows, *(P(),) * 4)
    function = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(of_rows, of_cache))
    with jax.set_mesh(mesh):
        compiled = jax.jit(function, donate_argnums=0).lower(cache, q, new, *others).compile()
    check_kernels(dumped)
    layer = pages * page_size * head_size
    size = layer + 4 * pages * page_size if is_fp8 else 2 * layer
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * layers * size
    assert opcodes_of_size(compiled.as_text(), layers * layer) <= IN_PLACE | {"bitcast-convert"}
    body = [line for lines in computations_in_loops(compiled.as_text()).values() for line in lines]
    assert sum("custom-call(" in line and "mosaic" in line for line in body) == 2  # attention, and merging
    assert sum(" fusion(" in line for line in body) <= (12 if is_fp8 else 8)


@pytest.mark.slow
@pytest.mark.parametrize("length", [777, 1001])
def test_lengths_that_divide_nothing(length: int, dumped: Path) -> None:
    q, k = array(jnp.float16, 333, 6, 128), array(jnp.float16, length, 2, 128)
    compile_for_h100(lambda q, k: attention(q, k, k, causal=False), (q, k))
    check_kernels(dumped)


@pytest.mark.parametrize(
    "head_size", [pytest.param(64, marks=pytest.mark.slow), 128, pytest.param(256, marks=pytest.mark.slow)]
)
def test_gradients(head_size: int, dumped: Path) -> None:
    def loss(q, k, v):  # type: ignore[no-untyped-def]
        return jnp.sum(attention(q, k, v)[0].astype(jnp.float32))

    q, k = array(jnp.bfloat16, 4099, 8, head_size), array(jnp.bfloat16, 4099, 2, head_size)
    compile_for_h100(jax.grad(loss, (0, 1, 2)), (q, k, k))
    check_kernels(dumped)
    check_kernels(dumped, "attention_of_queries")
    check_kernels(dumped, "attention_of_keys")


@pytest.mark.parametrize("ring", [pytest.param(ring, marks=pytest.mark.slow) for ring in (ring_pass_kv, ring_pass_q)])
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
