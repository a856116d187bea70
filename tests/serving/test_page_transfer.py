"""Pages that are read from the devices of one mesh and written to those of another are the same, bit by bit."""

import functools
import itertools

import jax
import numpy as np
import pytest
from compilations import count_compilations
from hlo import IN_PLACE, opcodes_of_size
from hypothesis import given, settings
from hypothesis import strategies as st
from page_cases import NUM_PAGES, PAGE_SIZE, PageCase, make_config

from longctx.serving.kv_cache.connector import PageBlock, assemble
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.runner.layer_pages import LayerPages
from longctx.serving.runner.page_programs import PoolShape, compile_read, compile_write
from longctx.serving.runner.paged_cache import PagedCache

MESHES = [sizes for sizes in itertools.product((1, 2, 3, 4, 5, 8), repeat=3) if np.prod(sizes) <= 8]
MESHES = [sizes for sizes in MESHES if sizes[0] <= 5 and sizes[2] in (1, 2, 4, 8)]


@functools.cache
def make_case(sizes: tuple[int, int, int], kv_heads: int, dtype: str) -> PageCase:
    """Cases share compiled programs; every test fills the caches anew."""
    return PageCase(sizes, make_config(5, kv_heads), dtype)


@st.composite
def parts(draw: st.DrawFn, size: int) -> tuple[int, int]:
    first = draw(st.integers(0, size - 1))
    return first, draw(st.integers(first + 1, size))


@settings(max_examples=6)
@given(
    source=st.sampled_from(MESHES),
    target=st.sampled_from(MESHES),
    kv_heads=st.sampled_from([2, 4]),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    layers=parts(5),
    seed=st.integers(0, 2**20),
    count=st.integers(1, NUM_PAGES),
    on_devices=st.booleans(),
)
def test_pages_are_the_same_on_another_mesh(
    source: tuple[int, int, int],
    target: tuple[int, int, int],
    kv_heads: int,
    dtype: str,
    layers: tuple[int, int],
    seed: int,
    count: int,
    on_devices: bool,
) -> None:
    one, other = make_case(source, kv_heads, dtype), make_case(target, kv_heads, dtype)
    if one is other:
        other = PageCase(target, one.config, dtype)
    one.fill(seed)
    other.zeros()
    random = np.random.default_rng(seed)
    pages, to = (random.permutation(case.num_pages)[:count].tolist() for case in (one, other))
    read = one.transfer.read(one.cache, pages, layers)
    blocks = read.on_devices() if on_devices else read.result()

    # They are the pages that were asked for, and each part of them came once.
    out = np.zeros((count, *one.transfer.layout.shape), one.payload.dtype)
    assemble(blocks, out, one.transfer.layout.whole)
    expected = np.zeros_like(out)
    expected[:, slice(*layers)] = one.payload[pages, slice(*layers)]
    np.testing.assert_array_equal(out, expected)
    sizes = [np.prod(block.data.shape) for block in blocks]
    assert sum(sizes) == expected[:, slice(*layers)].size

    # Half of the blocks at a time, in any order.
    random.shuffle(blocks)  # type: ignore[arg-type]
    for some in (blocks[::2], blocks[1::2]):
        placed = [other.transfer.place(to, block) for block in some]
        other.cache, _ = other.transfer.write(other.cache, placed)
    wanted = np.zeros_like(other.payload)
    wanted[to] = expected
    np.testing.assert_array_equal(other.on_devices(), wanted)


SLIDING = (True, False, True, True, False)


@settings(max_examples=6)
@given(
    sizes=st.lists(st.sampled_from(MESHES), min_size=2, max_size=2),
    sliding=st.sampled_from([SLIDING, (True,) * 5]),
    dtype=st.sampled_from(["float32", "float8_e4m3fn"]),
    layers=parts(5),
    seed=st.integers(0, 2**20),
    is_jax=st.booleans(),
)
def test_pages_of_sliding_layers_are_where_window_pages_are(
    sizes: list[tuple[int, int, int]],
    sliding: tuple[bool, ...],
    dtype: str,
    layers: tuple[int, int],
    seed: int,
    is_jax: bool,
) -> None:
    """Layers of a payload that have no window page to be written to are dropped; what there is none of is anything."""
    one, other = (PageCase(size, make_config(5, 2, sliding), dtype, seed) for size in sizes)
    other.zeros()
    random, layout, part = np.random.default_rng(seed), one.transfer.layout, slice(*layers)
    pages, to = (random.permutation(case.num_pages)[:9].tolist() for case in (one, other))
    read = one.transfer.read(one.cache, pages, layers, one.window_of(pages))
    out, wanted = np.zeros((2, 9, *layout.shape), one.payload.dtype)
    assemble(read.on_devices() if is_jax else read.result(), out, layout.whole)

    def has(case: PageCase, pages: list[int]) -> np.ndarray:
        """Whether pages have each layer: bool `[pages, layers]`."""
        return ~np.array(sliding)[None] | (np.array(case.window_of(pages))[:, None] >= 0)

    wanted[:, part] = one.payload[pages, part]
    was_there = has(one, pages)
    np.testing.assert_array_equal(out[was_there], wanted[was_there])

    for block in read.on_devices() if is_jax else read.result():
        placed = other.transfer.place(to, block, other.window_of(to))
        other.cache, _ = other.transfer.write(other.cache, [placed])
    expected, window = np.zeros_like(other.payload), np.array(other.window_of(to))
    expected[to] = np.where(has(other, to)[..., None, None, None, None], out, 0)
    np.testing.assert_array_equal(other.on_devices(), expected)
    assert window.max() >= 0


def test_wrong_window_pages_are_refused() -> None:
    case, plain = PageCase((1, 2, 1), make_config(5, 2, SLIDING)), make_case((1, 1, 1), 2, "float32")
    for match, window in (
        ("window_pages must be given where", None),
        ("window_pages must be 2", [0]),
        ("window_pages must be 2", [0, -2]),
        ("of their pages' ranks, got 7 for page 0", [7, 8]),
    ):
        with pytest.raises(ValueError, match=match):
            case.transfer.read(case.cache, [0, NUM_PAGES], (0, 5), window)
    with pytest.raises(ValueError, match="window_pages must be given where"):
        plain.transfer.read(plain.cache, [0], (0, 5), [0])
    with pytest.raises(ValueError, match="num_window_pages must be 1 or more"):
        LayerPages.of(make_config(5, 2, SLIDING), 1, NUM_PAGES)
    with pytest.raises(ValueError, match="num_window_pages must be 0 for"):
        LayerPages.of(make_config(), 1, NUM_PAGES, 3)


@settings(max_examples=8)
@given(
    target=st.sampled_from(MESHES),
    kv_heads=st.sampled_from([2, 4]),
    dtype=st.sampled_from(["float32", "float8_e4m3fn"]),
    layers=parts(5),
    heads=st.data(),
    first=st.integers(0, 5),
    seed=st.integers(0, 2**20),
    is_jax=st.booleans(),
)
def test_any_part_of_pages_is_written(
    target: tuple[int, int, int],
    kv_heads: int,
    dtype: str,
    layers: tuple[int, int],
    heads: st.DataObject,
    first: int,
    seed: int,
    is_jax: bool,
) -> None:
    """Other layers, heads and pages stay as they are."""
    case = make_case(target, kv_heads, dtype)
    layout = case.transfer.layout
    case.zeros()
    part = PageSlice(layers, heads.draw(parts(kv_heads)))
    random = np.random.default_rng(seed)
    pages = random.permutation(case.num_pages)[:9].tolist()
    shape = 9 - first, part.layers[1] - layers[0], 2, PAGE_SIZE, part.heads[1] - part.heads[0], layout.row_size
    data = random.integers(0, 256, shape).astype(layout.bits)
    block = PageBlock(first, part, jax.device_put(data, jax.devices()[7]) if is_jax else data)
    case.cache, _ = case.transfer.write(case.cache, [case.transfer.place(pages, block)])
    expected = np.zeros_like(case.payload)
    assemble(
        [PageBlock(0, part, data)],
        view := np.zeros((9 - first, *layout.shape), layout.bits),
        layout.whole,
    )
    expected[pages[first:]] = view
    np.testing.assert_array_equal(case.on_devices(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_the_pool_stays_where_it_is(sizes: tuple[int, int, int], dtype: str) -> None:
    case = PageCase(sizes, make_config(), dtype)
    pools = 4 if dtype == "float8_e4m3fn" else 2

    def addresses() -> list[int]:
        return [shard.data.unsafe_buffer_pointer() for pool in case.cache[:pools] for shard in pool.addressable_shards]

    before, sharding = addresses(), case.cache.k.sharding
    for pages in ([3], [5, 6, 7, 0, 1, 2, 9, 8, 4]):
        (block, *_) = blocks = case.transfer.read(case.cache, pages, (0, 5)).result()
        assert block.data.dtype == case.payload.dtype
        case.cache, _ = case.transfer.write(case.cache, [case.transfer.place(pages, block) for block in blocks])
    assert addresses() == before
    assert case.cache.k.sharding == sharding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_programs_make_no_array_of_the_pools_size(dtype: str) -> None:
    """The bytes that they use besides their arguments and results do not depend on the pool."""
    device, pool, bucket = jax.devices()[0], PoolShape(PageLayout(1, 2, 8, 16, dtype), 3 * 4096, 2), 24
    size, row_bytes = pool.rows * 16 * 2 * 8, pool.layout.page_bytes
    read = compile_read(device, pool, bucket)
    for program in (read, *(compile_write(device, pool, bucket, heads, True) for heads in (1, 2))):
        memory, text = program.memory_analysis(), program.as_text()
        assert memory.alias_size_in_bytes == (0 if program is read else pool.rows * row_bytes)
        assert memory.temp_size_in_bytes <= 2 * bucket * row_bytes + 4096
        assert opcodes_of_size(text, int(size)) <= IN_PLACE - {"scatter"}


def test_a_read_sees_the_pages_before_a_later_write() -> None:
    """The device's order decides, however late somebody waits for the read."""
    case = PageCase((2, 1, 1), make_config())
    pages = [*range(NUM_PAGES)]
    ones = PageBlock(0, case.transfer.layout.whole, np.ones_like(case.payload))
    reads = []
    for _ in range(3):
        reads.append(case.transfer.read(case.cache, pages, (0, 5)))
        case.cache, _ = case.transfer.write(case.cache, [case.transfer.place(pages, ones)])
    for read, expected in zip(reads, (case.payload, ones.data, ones.data), strict=True):
        out = np.zeros_like(case.payload)
        assemble(read.result(), out, case.transfer.layout.whole)
        np.testing.assert_array_equal(out, expected)


def test_nothing_is_compiled_once_programs_are() -> None:
    case = PageCase((2, 2, 2), make_config())
    case.transfer.compile()
    pages = [*range(7), *range(NUM_PAGES, NUM_PAGES + 11)]
    whole = np.ones((len(pages), *case.transfer.layout.shape), np.float32)
    with count_compilations() as compiled:
        for layers in ((0, 5), (1, 4), (4, 5)):
            blocks = case.transfer.read(case.cache, pages, layers).result()
            blocks.append(PageBlock(0, PageSlice(layers, (0, 4)), whole[:, slice(*layers)]))
            case.cache, _ = case.transfer.write(case.cache, [case.transfer.place(pages, block) for block in blocks])
    assert not compiled


def test_needed_is_what_devices_have() -> None:
    case = PageCase((2, 2, 1), make_config())
    assert case.transfer.needed([0, NUM_PAGES]).all()
    assert case.transfer.needed([0, 1, 2]).shape == (3, 5, 4)


def test_wrong_blocks_and_pages_are_refused() -> None:
    case = PageCase((1, 1, 1), make_config())
    layout = case.transfer.layout
    good = np.zeros((2, *layout.shape), np.float32)
    for match, pages, block in (
        ("pages must be from 0 to 11", [0, 12], PageBlock(0, layout.whole, good)),
        ("pages must be from 0 to 11", [-1, 2], PageBlock(0, layout.whole, good)),
        ("pages 0 to 1 of its load, got 1 to 2", [0, 1], PageBlock(1, layout.whole, good)),
        ("pages 0 to 1 of its load, got -1 to 0", [0, 1], PageBlock(-1, layout.whole, good)),
        ("block must have pages", [0, 1], PageBlock(0, layout.whole, good.astype(np.float16))),
        ("block must have pages", [0, 1], PageBlock(0, layout.whole, good[:, :4])),
        ("block must have pages", [0, 1], PageBlock(0, layout.whole, good[0])),
        ("part of", [0, 1], PageBlock(0, PageSlice((0, 6), (0, 4)), good)),
        ("part of", [0, 1], PageBlock(0, PageSlice((3, 3), (0, 4)), good[:, :0])),
    ):
        with pytest.raises(ValueError, match=match):
            case.transfer.place(pages, block)
    for layers in ((0, 6), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match="layers must be"):
            case.transfer.read(case.cache, [0], layers)
    assert isinstance(case.cache, PagedCache)
    np.testing.assert_array_equal(case.on_devices(), case.payload)


def test_blocks_may_change_once_they_are_written() -> None:
    """CPUs read them where they are, also while a long step that was begun before runs."""
    case = make_case((1, 1, 1), 4, "float32")
    case.zeros()
    layout, pages = case.transfer.layout, [3, 7, 1]
    data = np.random.default_rng(0).normal(size=(3, *layout.shape)).astype(np.float32)
    expected = np.zeros_like(case.payload)
    expected[pages] = data
    slow = jax.jit(lambda pools, x: (pools, jax.lax.fori_loop(0, 200, lambda _, x: x @ x / 8.0, x)), donate_argnums=0)
    cache, _ = slow(case.cache, np.eye(256, dtype=np.float32))
    placed = case.transfer.place(pages, PageBlock(0, layout.whole, data))
    case.cache, done = case.transfer.write(PagedCache(*cache), [placed])
    jax.block_until_ready(done)
    data[:] = -1
    np.testing.assert_array_equal(case.on_devices(), expected)
