"""Every copy that the forward kernel makes delivers its rows, by the rule of `tma_copy`: of Q, K, V, and in pages."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.launch_context import TileTransform
from jax.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from tma_copy import tile_of, tma_copy

from longctx.kernels.attention import mosaic_gpu as contiguous
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.mosaic_gpu import adapter, keys
from longctx.kernels.mosaic_gpu.tile_config import WARPGROUP_ROWS, TileConfig
from longctx.kernels.paged_attention import mosaic_gpu as paged
from longctx.kernels.paged_attention.operands import check_paged_operands
from longctx.kernels.work import Tile, Tiles

HEAD_SIZE = 64


def constant(value: Any) -> int:
    """The value of a constant expression of MLIR."""
    operation = value.owner
    operands = [constant(x) for x in operation.operands]
    match operation.name:
        case "arith.constant":
            return int(operation.attributes["value"].value)
        case "arith.divui":
            return operands[0] // operands[1]
        case "arith.remui":
            return operands[0] % operands[1]
    raise AssertionError(f"another operation: {operation.name}")


@given(st.integers(0, 200), st.integers(0, 2))
def test_mosaic_splits_shapes_and_starts_as_the_emulation_does(row: int, column: int) -> None:
    tile = tile_of(192, itemsize=2)
    transform = TileTransform(tile)
    assert transform.transform_gmem_shape((3, 40, 192)) == (3, 5, 3, *tile)
    assert transform.transform_gmem_shape((3, 5, 64)) == (3, 1, 1, 5, 64)
    assert transform.transform_shape((1, 16, 192)) == (1, 2, 3, *tile)
    with make_ir_context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
        index = [arith.constant(ir.IndexType.get(), i) for i in (2, row, 64 * column)]
        coordinates = [constant(x) for x in transform.transform_index(index)]
    assert coordinates == [2, row // 8, column, row % 8, 0]


def rows_of(x: np.ndarray, start: int, count: int) -> np.ndarray:
    """Rows [start, start + count) of x, zeros beyond its end."""
    return np.pad(x, ((0, start + count), (0, 0)))[start : start + count]


@given(st.integers(1, 9), st.integers(0, 80), st.integers(1, 8), st.sampled_from([64, 128]))
def test_a_copy_delivers_its_rows_if_it_starts_at_a_tile(tiles: int, start: int, count: int, size: int) -> None:
    x = 1.0 + np.arange(8 * tiles * size).reshape(8 * tiles, size)
    got, want = tma_copy(x, start, 8 * count), rows_of(x, start, 8 * count)
    lost = np.arange(8 * count) % 8 >= 8 - start % 8
    np.testing.assert_array_equal(got[~lost], want[~lost])
    assert not got[lost].any()


@pytest.mark.parametrize(("shape", "count"), [((12, 64), 8), ((16, 96), 8), ((16, 64), 12), ((4096, 64), 2056)])
def test_copies_that_mosaic_refuses(shape: tuple[int, int], count: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        tma_copy(np.zeros(shape), 0, count)


class Ref:
    """A reference to memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    @property
    def at(self) -> "Ref":
        return self

    def __getitem__(self, index: Any) -> "Ref":
        parts = [
            slice(int(part.start), int(part.start) + part.size) if isinstance(part, type(pl.ds(0, 1))) else int(part)
            for part in (index if isinstance(index, tuple) else (index,))
        ]
        return Ref(self.values[tuple(parts)])


def block_of(operands: keys.Contiguous | keys.Paged, half: int, tile: Tile, block: int, head: int) -> Any:
    """A block of keys (half 0) or values (half 1) as the kernel's own code copies it, and its scales."""
    head_size, is_fp8 = operands.k.shape[-1], getattr(operands, "k_scale", None) is not None
    config = TileConfig.choose(head_size, 1, is_fp8)
    size = config.block_kv
    to, scales = Ref(np.full((size, head_size), np.nan)), Ref(np.full(size, np.nan))

    def copy_rows(source: np.ndarray, before: tuple[Any, ...], start: Any, head: int, to: Ref, barrier: None) -> None:
        of_head = source[tuple(map(int, before))][:, head]
        to.values[...] = tma_copy(of_head, int(start), len(to.values), itemsize=1 if is_fp8 else 2)

    def copy(source: Ref, to: Ref, barrier: None) -> None:
        to.values[...] = source.values

    with (
        jax.disable_jit(),
        mock.patch.object(keys, "copy_rows", copy_rows),
        mock.patch.object(keys.plgpu, "copy_gmem_to_smem", copy),
    ):
        shared = {"pages": np.zeros(operands.shared(config)["pages"].shape, int)} if operands.shared(config) else {}
        operands = operands.load()
        operands.find(tile, jnp.int32(block), size, shared)
        operands.fetch(half, tile, jnp.int32(block), head, shared, to, None)
        if is_fp8:
            operands.fetch_scales(half, tile, jnp.int32(block), head, shared, scales, None)
    return to.values, scales.values


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=2)
def test_pages_arrive(head_size: int, page_size: int, is_fp8: bool, seed: int) -> None:
    """Slot by slot of every block, as far as there are any in use; so do their scales."""
    rng = np.random.default_rng(seed)
    entries, heads = -(-400 // page_size), 2
    k, v = rng.random((2, entries + 3, page_size, heads, head_size))
    k_scale, v_scale = rng.random((2, entries + 3, heads, page_size))
    table = rng.permutation(entries)[None]
    operands: Any = keys.Paged(k, v, table.astype(np.int32), np.array([2], np.int32))
    if is_fp8:
        operands = operands._replace(k_scale=Ref(k_scale), v_scale=Ref(v_scale))
    in_use = int(rng.integers(1, 401))
    tile = Tile(*[jnp.int32(0)] * len(Tile._fields))._replace(kv_tokens=jnp.int32(in_use))
    size, head = TileConfig.choose(head_size, 1).block_kv, int(rng.integers(heads))
    for half, (pages, scale) in enumerate(((k, k_scale), (v, v_scale))):
        slots = pages[2 + table[0], :, head].reshape(-1, head_size)
        of_slots = scale[2 + table[0], head].ravel()
        for block in range(-(-in_use // size)):
            stop = min(in_use, (block + 1) * size)
            arrived, scales = block_of(operands, half, tile, block, head)
            np.testing.assert_array_equal(arrived[: stop - block * size], slots[block * size : stop])
            assert np.isfinite(arrived).all()  # the rest came from some page
            if is_fp8:
                np.testing.assert_array_equal(scales[: stop - block * size], of_slots[block * size : stop])
                assert np.isfinite(scales).all()


class Reached(Exception):
    """The forward kernel was called."""


def arguments_of_kernel(module: Any, function: Any, *arguments: Any) -> tuple[Any, ...]:
    """What a function of the module passes to the forward kernel."""
    with mock.patch.object(module, "attention_forward", side_effect=Reached) as kernel, pytest.raises(Reached):
        function(*arguments)
    return kernel.call_args.args


def name_rows(tokens: int, heads: int) -> jax.Array:
    """Queries `[T, N, H]` whose first two components are the token, from 1 on, and the head."""
    q = np.zeros((tokens, heads, HEAD_SIZE))
    q[..., 0], q[..., 1] = 1 + np.arange(tokens)[:, None], np.arange(heads)
    return jnp.asarray(q, jnp.bfloat16)


plan_paged = jax.jit(paged.plan_mosaic_gpu)
plan_contiguous = jax.jit(contiguous.plan_mosaic_gpu, static_argnums=(0, 1, 4))
TOKENS, SEQUENCES, KV_HEADS = 100, 6, 2


@st.composite
def sequences_of_rows(draw: st.DrawFn) -> np.ndarray:
    """`[T]`: decodes beside chunks, sequences without rows, padding; in order or shuffled."""
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(0, 40)), min_size=SEQUENCES, max_size=SEQUENCES))
    number = np.repeat(np.arange(SEQUENCES), counts)[:TOKENS]
    number = np.concatenate([number, np.full(TOKENS - len(number), -1)])
    return np.random.default_rng(len(number)).permutation(number) if draw(st.booleans()) else number


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8])
@given(sequences_of_rows())
def test_queries_of_rows_over_pages_arrive(group: int, q_sequence: np.ndarray) -> None:
    """Where the result of a row is read, there the kernel has its query."""
    q = name_rows(TOKENS, group * KV_HEADS)
    pages = jnp.zeros((8, 16, KV_HEADS, HEAD_SIZE), jnp.bfloat16)
    table, lengths = np.zeros((SEQUENCES, 8), np.int32), np.full(SEQUENCES, 100, np.int32)
    positions = np.arange(TOKENS, dtype=np.int32)
    operands = check_paged_operands(q, pages, pages, table, None, lengths, positions, q_sequence.astype(np.int32), 0)
    operands = jax.tree.map(jnp.asarray, operands)
    plan = plan_paged(operands)
    rows, _, _, work, config, _ = arguments_of_kernel(
        paged, paged.mosaic_gpu_paged_attention, operands, AttentionRule(True, 1.0), plan
    )
    rows = np.asarray(adapter.pad_for_tma(rows, 1, config.tile_config.block_q), np.float32)
    tiles = np.asarray(work.tiles)
    arrived = np.zeros((len(tiles), config.tile_config.block_q, KV_HEADS, HEAD_SIZE))
    for tile, (q_batch, q_row) in enumerate(tiles[:, :2]):
        for part in range(0, config.tile_config.block_q, WARPGROUP_ROWS):
            for head in range(KV_HEADS):
                copied = tma_copy(rows[q_batch, :, head], q_row + part, WARPGROUP_ROWS)
                arrived[tile, part : part + WARPGROUP_ROWS, head] = copied
    real = np.flatnonzero(q_sequence >= 0)
    found = arrived.reshape(-1, *arrived.shape[2:])[np.asarray(plan.place)[real]]  # [real, G, K, H]
    np.testing.assert_array_equal(found[..., 0], np.broadcast_to(1 + real[:, None, None], found.shape[:3]))
    heads = np.arange(KV_HEADS) * group + np.arange(group)[:, None]
    np.testing.assert_array_equal(found[..., 1], np.broadcast_to(heads, found.shape[:3]))


@pytest.mark.parametrize(
    ("length", "kv_length", "group"), [(1, 300, 4), (70, 201, 3), (600, 601, 1)], ids=["decode", "folded", "not folded"]
)
def test_contiguous_queries_and_keys_arrive(length: int, kv_length: int, group: int) -> None:
    """From any row on that a tile names: whole tiles and blocks, with zeros beyond the end."""
    heads, rng = group * KV_HEADS, np.random.default_rng(length)
    q, k, v = (
        jnp.asarray(rng.random((2, n, heads_of, HEAD_SIZE)), jnp.bfloat16)
        for n, heads_of in ((length, heads), (kv_length, KV_HEADS), (kv_length, KV_HEADS))
    )
    tokens = [
        Tokens(jnp.broadcast_to(jnp.arange(n), (2, n)) + past, jnp.zeros((2, n), jnp.int32))
        for n, past in ((length, kv_length // 2), (kv_length, 0))
    ]
    plan = plan_contiguous(q.shape, k.shape, *tokens, AttentionRule(True, 1.0))
    q, operands, _, work, config, _ = arguments_of_kernel(
        contiguous, contiguous.mosaic_gpu_attention, q, k, v, *tokens, AttentionRule(True, 1.0), plan
    )
    block_q, block_kv = config.tile_config.block_q, config.tile_config.block_kv
    q = np.asarray(adapter.pad_for_tma(q, 1, block_q), np.float32)
    operands = jax.tree.map(lambda x: np.asarray(x, np.float32), operands.pad_to_block(block_kv))
    blocks = set()
    for row in np.asarray(work.tiles):
        tiles = Tiles(*row)
        for start in range(tiles.q_row, tiles.q_row + block_q, WARPGROUP_ROWS):
            for head in range(q.shape[2]):
                rows = q[tiles.q_batch, :, head]
                np.testing.assert_array_equal(
                    tma_copy(rows, start, WARPGROUP_ROWS), rows_of(rows, start, WARPGROUP_ROWS)
                )
        blocks |= {(tiles.kv, block) for block in range(tiles.start, tiles.stop)}
    for entry, block in blocks:
        tile = Tile(*[jnp.int32(0)] * len(Tile._fields))._replace(kv=jnp.int32(entry))
        for half, x in enumerate((k, v)):
            want = rows_of(np.asarray(x[entry, :, 1], np.float32), block * block_kv, block_kv)
            np.testing.assert_array_equal(block_of(operands, half, tile, block, 1)[0], want)
