"""The Mosaic GPU kernels compiled for an H100: every named shape, sound machine code, no copies of keys, in a mesh."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import machine_code
import pytest
from h100 import h100_mesh
from hlo import IN_PLACE, opcodes_of_size
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from paged_step import computations_in_loops

from benchmarks.kernel_ptx import program_of
from benchmarks.kernel_shapes import SHAPES
from longctx.kernels import attention, explain, paged_attention, plan_attention, plan_paged_attention, write_pages
from longctx.kernels.mosaic_gpu.tile_config import TileConfig
from longctx.parallel import ring_pass_kv, ring_pass_q


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


def check_kernels(dumped: Path, *entries: str, copies: int = 1, is_fp8: bool = False, has_first: bool = False) -> None:
    """Products by wgmma and copies by TMA in the named kernels (attention); sound machine code of all."""
    texts = [path.read_text() for path in dumped.glob("*.ptx")]
    for entry in entries or ("attention",):
        attending = [text for text in texts if f".entry {entry}" in text]
        assert attending
        for text in attending:
            assert "wgmma.mma_async" in text
            assert "cp.async.bulk.tensor" in text
    machine_code.check_kernels(dumped, copies, is_fp8, has_first)


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes(name: str, dumped: Path) -> None:
    shape = SHAPES[name]
    compiled = compile_for_h100(*program_of(shape))
    check_kernels(dumped)
    # Nothing of the size of the keys is made, but by a kernel pieces of a decode of few keys.
    size = shape.batch * shape.kv_length * shape.kv_heads * shape.head_size
    if shape.kind != "prefill":
        assert opcodes_of_size(compiled.as_text(), size) <= IN_PLACE - {"fusion"} | {"custom-call"}


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama3-8b/tp8/prefill@8k", 0),
        pytest.param("llama3-70b/tp8/chunk64@1m", 1, marks=pytest.mark.slow),
        pytest.param("llama3-8b/tp1/chunk512@128k", 0, marks=pytest.mark.slow),
        ("llama3-8b/tp1/decode@128k/b32", 1),
        pytest.param("llama3-8b/tp8/decode@128k/b1", 1, marks=pytest.mark.slow),
        pytest.param("odd/prefill", 3, marks=pytest.mark.slow),
        pytest.param("odd/chunk", 3, marks=pytest.mark.slow),
    ],
)
def test_a_call_with_a_plan_is_its_kernels(name: str, most: int, dumped: Path) -> None:
    """One of each kind of tile: split and not, folded and not. Their machine code is sound.

    XLA operations round them: at most the transposition of q, and slices where lengths are no whole tiles.
    """
    shapes = {"odd/prefill": ((3000, 32, 128), (3000, 8, 128)), "odd/chunk": ((300, 6, 128), (5000, 2, 128))}
    q_shape, kv_shape = shapes[name] if name in shapes else (SHAPES[name].q_shape, SHAPES[name].kv_shape)
    q, k = array(jnp.bfloat16, *q_shape), array(jnp.bfloat16, *kv_shape)
    positions = array(jnp.int32, q_shape[-3]), array(jnp.int32, kv_shape[-3])
    with jax.set_mesh(h100_mesh(context=1)):
        plan = jax.eval_shape(lambda *positions: plan_attention(q, k, *positions), *positions)
    assert plan.implementation == "mosaic_gpu"
    compiled = compile_for_h100(lambda q, k, v, plan: attention(q, k, v, plan=plan), (q, k, k, plan))
    entry = compiled.as_text().split("ENTRY")[1].splitlines()
    found = [
        line for line in entry if re.search(r" (fusion|copy|transpose|slice|pad|convert|concatenate|reduce)\(", line)
    ]
    assert len(found) <= most, found
    assert sum("mosaic" in line and "custom-call(" in line for line in entry) in (1, 2)
    check_kernels(dumped)


@pytest.mark.parametrize(
    ("head_size", "page_size", "is_fp8", "most_rows"),
    [
        (128, 64, True, None),
        pytest.param(64, 16, False, 1, marks=pytest.mark.slow),  # `mesh_step` has such pages
        *(
            pytest.param(*sizes, False, most_rows, marks=pytest.mark.slow)
            for *sizes, most_rows in (
                *((128, 64, None), (256, 256, None), (64, 64, None), (64, 16, None), (128, 16, None), (256, 16, None)),
                *((256, 256, 1), (128, 64, 1), (128, 16, 1), (256, 16, 1)),
            )
        ),
        *(
            pytest.param(h, p, True, None, marks=pytest.mark.slow)
            for h, p in ((256, 256), (64, 64), (128, 32), (256, 32))
        ),
    ],
)
def test_layers_over_pages_kept_as_bits(
    head_size: int, page_size: int, is_fp8: bool, most_rows: int | None, dumped: Path
) -> None:
    """In a `shard_map` over KV heads: pages written and read in place, and planned once for all layers.

    With tiles for any number of rows a sequence, or for decodes.
    """
    layers, pages, rows, ranks = 3, 2048, 64, 2
    mesh = h100_mesh(tensor=ranks)

    def step(cache, q, new, table, lengths, positions, sequence):  # type: ignore[no-untyped-def]
        metadata = (table, None, lengths, positions, sequence)
        plan = plan_paged_attention(q.shape[1], cache[0], *metadata, max_rows_per_sequence=most_rows)
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
    block = TileConfig.choose(head_size, (most_rows or rows) * 8, is_fp8).block_kv
    check_kernels(dumped, copies=max(1, block // page_size) * (2 if is_fp8 else 1), is_fp8=is_fp8)
    layer = pages * page_size * head_size
    size = layer + 4 * pages * page_size if is_fp8 else 2 * layer
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * layers * size
    assert opcodes_of_size(compiled.as_text(), layers * layer) <= IN_PLACE | {"bitcast-convert"}
    body = [line for lines in computations_in_loops(compiled.as_text()).values() for line in lines]
    assert sum("custom-call(" in line and "mosaic" in line for line in body) == 2  # attention, and merging
    assert sum(" fusion(" in line for line in body) <= (10 if is_fp8 else 6)


@pytest.mark.slow
@pytest.mark.parametrize("length", [777, 1001])
def test_lengths_that_divide_nothing(length: int, dumped: Path) -> None:
    q, k = array(jnp.float16, 333, 6, 128), array(jnp.float16, length, 2, 128)
    compile_for_h100(lambda q, k: attention(q, k, k, causal=False), (q, k))
    check_kernels(dumped)


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_gradients(head_size: int, dumped: Path) -> None:
    def loss(q, k, v):  # type: ignore[no-untyped-def]
        return jnp.sum(attention(q, k, v)[0].astype(jnp.float32))

    q, k = array(jnp.bfloat16, 4099, 8, head_size), array(jnp.bfloat16, 4099, 2, head_size)
    compile_for_h100(jax.grad(loss, (0, 1, 2)), (q, k, k))
    check_kernels(dumped, "attention", "attention_of_queries", "attention_of_keys")


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_gradients_with_limits_of_queries(head_size: int, dumped: Path) -> None:
    """From the keys' side three numbers of each query say which keys it sees, in place of two."""

    def loss(q, k, v, first, last):  # type: ignore[no-untyped-def]
        return jnp.sum(attention(q, k, v, q_first=first, q_last=last)[0].astype(jnp.float32))

    q, k = array(jnp.bfloat16, 4099, 8, head_size), array(jnp.bfloat16, 4099, 2, head_size)
    limits = [array(jnp.int32, 4099)] * 2
    compile_for_h100(jax.grad(loss, (0, 1, 2)), (q, k, k, *limits))
    check_kernels(dumped, "attention", "attention_of_queries", "attention_of_keys", has_first=True)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [ring_pass_kv, ring_pass_q])
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
