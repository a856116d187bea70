"""Attention of a step's rows to pages on several ranks, by every exchange, against the dense oracle."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import fp8_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from longctx.parallel import make_mesh
from longctx.serving.executor.row_layout import RowLayout
from longctx.serving.runner.attention import PagedAttend, WindowLayers
from longctx.serving.runner.paged_cache import LayerInputs, PagedCache, PageTables
from longctx.serving.runner.step_inputs import RowInputs, Shape
from longctx.serving.scheduler.batch import Batch, Chunk

PAGE, PAGES, SLOTS, ENTRIES = 4, 24, 4, 20
HEADS, KV_HEADS, SIZE = 4, 2, 8
LAYERS, LAYER = 2, 1
WINDOW, WINDOW_PAGES = 10, 20  # tokens that queries of layer 1 see in a model with sliding layers, and pages for them
SINKS = np.array([0.5, -2.0, 1.5, -np.inf], np.float32)  # in that model
# (exchange, pages of a message, rounds): in several rounds as where a message would be too long.
EXCHANGES = [("pass_q", 0, 1), ("pass_kv", 24, 1), ("pass_kv", 4, 6), ("all_gather", 24, 1), ("all_gather", 4, 6)]
NOTHING_CACHED = [("pass_kv", 0, 1), ("all_gather", 0, 1)]


@functools.cache
def program(ranks: int, shape: Shape) -> Any:
    mesh = make_mesh(context=ranks)

    def on_device(cache: PagedCache, tables: Any, layer: Any, packed: Any, q: Any, k: Any, v: Any) -> Any:
        table, page_index, window_table = (x[0] for x in tables)
        window, kind = None, {}
        if shape.num_window_pages:
            window = WindowLayers(WINDOW, window_table, jnp.array([0, PAGES]))
            kind = {"is_sliding": layer == 1, "sinks": jnp.asarray(SINKS)}
        inputs = RowInputs.views(packed[0], shape)
        layers = LayerInputs(inputs, PageTables(table, page_index), shape, HEADS, cache.k, q.dtype)
        attend = PagedAttend.make(layers, window)
        out, cache = attend(cache, layer, q[0], k[0], v[0], **kind)
        return out[None], cache

    specs = P("context"), P("context"), P(), *[P("context")] * 4
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P("context"))
    return jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})  # compiles in less time


class Case(NamedTuple):
    """Sequences with so many cached and new tokens; the first is of one rank or replicated, the others are sharded."""

    ranks: int
    cached: tuple[int, ...]
    new: tuple[int, ...]
    seed: int
    replicates: bool = False
    slides: bool | None = None  # whether the layer is sliding, in a model with sliding layers

    def shape(self, exchange: str, message: int, rounds: int) -> Shape:
        others, window_pages = (8, 0) if self.replicates else (0, 8), 0 if self.slides is None else WINDOW_PAGES
        sizes = SLOTS, PAGE, PAGES, 0, self.ranks, exchange, message, rounds
        return Shape.of((12, *others), *sizes, num_window_pages=window_pages)


def check(case: Case, exchange: str, message: int, rounds: int, is_fp8: bool = False) -> None:
    """Check what rows attend to, within rounding, and what is in the cache afterwards, bit by bit."""
    rng, ranks, shape = np.random.default_rng(case.seed), case.ranks, case.shape(exchange, message, rounds)
    lengths = [cached + new for cached, new in zip(case.cached, case.new, strict=True)]
    free = [(rank * PAGES + rng.permutation(PAGES)).tolist() for rank in range(ranks)]
    owners = [
        rng.integers(0, ranks if slot or case.replicates else 1, -(-length // PAGE))
        for slot, length in enumerate(lengths)
    ]
    pages = [[free[rank].pop() for rank in each] for each in owners]
    kv = [rng.normal(size=(length, 2, KV_HEADS, SIZE)).astype(np.float32) for length in lengths]
    queries = [rng.normal(size=(length, HEADS, SIZE)).astype(np.float32) for length in lengths]

    # What was never written is NaN, and so are all layers but one. Window page 0 is another sequence's.
    layer = LAYER if case.slides is None else int(case.slides)
    per_layer = PAGES if case.slides is None else WINDOW_PAGES
    pool = np.full((2, ranks, PAGES + per_layer, PAGE, KV_HEADS, SIZE), np.nan, np.float32)
    pool[:, :, PAGES] = 1e3 if case.slides else np.nan
    tables = np.zeros((3, ranks, SLOTS, ENTRIES), np.int32)
    tables[1] = 1 << 20
    written, window_pages = pool.copy(), np.full((ranks, PAGES), -1)
    for slot, each in enumerate(pages):
        held = [0] * ranks
        for number, page in enumerate(each):
            rank, local = divmod(page, PAGES)
            if case.slides is not None and (number + 1) * PAGE > case.cached[slot] - WINDOW + 1:
                window_pages[rank, local] = np.max(window_pages[rank], initial=0) + 1
            tables[:, rank, slot, held[rank]] = local, number, max(0, window_pages[rank, local])
            held[rank] += 1
            if case.slides and window_pages[rank, local] < 0:
                continue
            row = PAGES * layer + (window_pages[rank, local] if case.slides else local)
            for cache, length in ((pool, case.cached[slot]), (written, lengths[slot])):
                values = kv[slot][number * PAGE : min(length, (number + 1) * PAGE)]
                cache[:, rank, row, : len(values)] = np.moveaxis(values, 1, 0)
    assert window_pages.max(initial=0) < WINDOW_PAGES

    chunks = []
    for slot, (start, count) in enumerate(zip(case.cached, case.new, strict=True)):
        windows = [window_pages[divmod(page, PAGES)] for page in pages[slot]]
        sequence: Any = SimpleNamespace(
            pages=pages[slot],
            window_pages=[page // PAGES * WINDOW_PAGES + own for page, own in zip(pages[slot], windows, strict=True)],
            completion=SimpleNamespace(tokens=np.arange(lengths[slot]) + 100 * slot),
        )
        on = tuple(range(ranks)) if slot or case.replicates else (0,)
        chunks.append(Chunk(sequence, slot, start, count, True, False, on, sharded=slot > 0))
    layout = RowLayout(Batch(case.seed, chunks), ranks, PAGES, PAGE, shape.num_window_pages)
    packed = layout.pack_rows(shape)
    inputs = RowInputs.views(packed, shape)
    inputs.message_rounds[:] = rounds
    token_of = {
        (r, i): (slot, at)
        for r in range(ranks)
        for i, (slot, at) in enumerate(zip(inputs.slots[r], inputs.positions[r], strict=True))
        if slot >= 0
    }
    q = np.zeros((ranks, shape.rows, HEADS, SIZE), np.float32)
    new = np.zeros((ranks, shape.rows, 2, KV_HEADS, SIZE), np.float32)
    for row, (slot, at) in token_of.items():
        q[row], new[row] = queries[slot][at], kv[slot][at]

    caches = [cache_of(x.reshape(2, -1, PAGE, KV_HEADS, SIZE), is_fp8) for x in (pool, written)]
    out, cache = program(ranks, shape)(caches[0], [*tables], jnp.int32(layer), packed, q, new[:, :, 0], new[:, :, 1])
    jax.tree.map(np.testing.assert_array_equal, cache, caches[1])
    out, worth = np.asarray(out), [fp8_numpy.round_rows(x) for x in kv] if is_fp8 else kv
    for row, (slot, at) in token_of.items():
        seen = worth[slot][max(0, at - WINDOW + 1) if case.slides else 0 : at + 1]
        sinks = None if case.slides is None else SINKS
        np.testing.assert_allclose(out[row], attend(queries[slot][at], seen, sinks), atol=1e-5, rtol=1e-5)


def cache_of(pools: np.ndarray, is_fp8: bool) -> PagedCache:
    """Of keys and values `[2, pages, page_size, K, H]`; in FP8 a row of NaN has values and a scale of NaN."""
    if not is_fp8:
        return PagedCache(*pools)
    values, scale = fp8_numpy.quantize(pools)
    return PagedCache(*values.view(np.uint8), *np.swapaxes(scale, 2, 3))


def attend(q: np.ndarray, kv: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Attention of a query `[N, H]` to keys and values `[S, 2, K, H]`, in float64."""
    k, v = np.repeat(kv.astype(np.float64), HEADS // KV_HEADS, 2).swapaxes(0, 1)
    scores = np.einsum("nh,snh->ns", q, k) * SIZE**-0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    rest = 0 if sinks is None else np.exp(sinks[:, None] - scores.max(1, keepdims=True))
    return np.einsum("ns,snh->nh", weights / (weights.sum(1, keepdims=True) + rest), v)


@st.composite
def cases(draw: Any, ranks: int, most_cached: int) -> Case:
    slots = draw(st.integers(2, SLOTS))
    cached = draw(st.lists(st.integers(0, most_cached), min_size=slots, max_size=slots))
    # 12 rows of each rank, and zigzag may give one rank two more than another.
    new = draw(st.lists(st.integers(1, 3 * ranks), min_size=slots, max_size=slots))
    return Case(ranks, tuple(cached), (draw(st.integers(1, 8)), *new[1:]), draw(st.integers(0, 99)))


@pytest.mark.parametrize(
    ("is_fp8", "exchange", "message", "rounds"),
    [
        pytest.param(is_fp8, *exchange, marks=() if not is_fp8 and exchange in EXCHANGES[:3:2] else pytest.mark.slow)
        for is_fp8, exchange in itertools.product((False, True), EXCHANGES)
    ],
)
@settings(max_examples=4)
@given(data=st.data())
def test_layers_of_both_kinds(is_fp8: bool, exchange: str, message: int, rounds: int, data: st.DataObject) -> None:
    """Full and sliding layers are one program; pages before the window are another sequence's. Heads have sinks."""
    case = data.draw(cases(3, 20))
    check(case._replace(slides=data.draw(st.booleans())), exchange, message, rounds, is_fp8)


@settings(max_examples=4)
@given(data=st.data())
def test_replicated_rows_in_layers_of_both_kinds(data: st.DataObject) -> None:
    check(data.draw(cases(2, 20))._replace(replicates=True, slides=data.draw(st.booleans())), "pass_q", 0, 1)


QUICK = [(False, 3, *EXCHANGES[0]), (True, 3, *EXCHANGES[2]), (False, 3, *EXCHANGES[4])]


@pytest.mark.parametrize(
    ("is_fp8", "ranks", "exchange", "message", "rounds"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for is_fp8, ranks, exchange in itertools.product((False, True), (2, 3), EXCHANGES)
        for case in [(is_fp8, ranks, *exchange)]
    ],
)
@settings(max_examples=4)
@given(data=st.data())
def test_sharded_rows_see_cached_and_new_keys(
    is_fp8: bool, ranks: int, exchange: str, message: int, rounds: int, data: st.DataObject
) -> None:
    """Packed sequences, any placement of pages, any number of rounds; new keys reach the owners of their pages.

    FP8: what travels, what is attended to and what is written are one row's values and scale.
    """
    check(data.draw(cases(ranks, 20)), exchange, message, rounds, is_fp8)


@pytest.mark.parametrize(
    ("ranks", "exchange", "message", "rounds"),
    [
        (3, "pass_kv", 4, 6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, "pass_kv", 4, 6), (5, "pass_q", 0, 1))),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((8, "pass_kv", 24, 1), (2, "pass_kv", 0, 1))),
    ],
)
@settings(max_examples=4)
@given(data=st.data())
def test_replicated_rows_beside_sharded_ones(
    ranks: int, exchange: str, message: int, rounds: int, data: st.DataObject
) -> None:
    """As decodes are beside a prompt whose keys travel: their pages are on any rank, which writes their keys."""
    case = data.draw(cases(ranks, 20 if message or exchange == "pass_q" else 0))
    check(case._replace(replicates=True), exchange, message, rounds)


@pytest.mark.parametrize(
    ("exchange", "message", "rounds"), [NOTHING_CACHED[0], pytest.param(*NOTHING_CACHED[1], marks=pytest.mark.slow)]
)
@settings(max_examples=4)
@given(case=cases(3, 0))
def test_where_nothing_is_cached_new_keys_alone_travel(exchange: str, message: int, rounds: int, case: Case) -> None:
    check(case, exchange, message, rounds)
