"""`paged_attention` against the float64 oracle on drawn ragged batches, `write_pages` against numpy."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.kernels import attention, merge_states, paged_attention, write_pages
from longctx.kernels.bits import to_bits


class Shape(NamedTuple):
    """Each compiles once; everything else about a case is data."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    page_size: int
    sequences: int
    entries: int
    index_given: bool  # or page_index=None


SHAPES = [
    Shape(rows=90, heads=8, kv_heads=2, size=8, page_size=16, sequences=5, entries=7, index_given=True),
    Shape(rows=300, heads=3, kv_heads=3, size=8, page_size=4, sequences=2, entries=90, index_given=False),
    Shape(rows=40, heads=8, kv_heads=1, size=24, page_size=64, sequences=3, entries=9, index_given=True),
    Shape(rows=5, heads=4, kv_heads=2, size=4, page_size=1, sequences=4, entries=33, index_given=False),
]


class Case(NamedTuple):
    """q and pages of float64; metadata as numpy arrays."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    metadata: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn, shapes: list[Shape] = SHAPES) -> Case:
    """Chunks and decodes of several sequences, padding, shuffled rows, shared pages; NaN where nothing is written."""
    shape = draw(st.sampled_from(shapes))
    rows = draw(st.sampled_from(["chunks", "decodes", "mixed", "shuffled"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    longest = shape.entries * shape.page_size
    kv_lengths = rng.integers(0, longest + 1, shape.sequences)

    padding = rng.choice([0, rng.integers(0, shape.rows), shape.rows], p=[0.5, 0.45, 0.05])
    q_sequence, q_positions = np.full(shape.rows, -1), np.zeros(shape.rows, int)
    row = 0
    while row < shape.rows - padding:
        sequence = rng.integers(shape.sequences)
        number = 1 if rows == "decodes" or (rows == "mixed" and rng.random() < 0.7) else rng.integers(1, shape.rows + 1)
        number = min(number, shape.rows - padding - row)
        last = rng.choice([kv_lengths[sequence], rng.integers(0, longest + 20)])  # past the end, and before the start
        q_sequence[row : row + number] = sequence
        q_positions[row : row + number] = last - number + np.arange(number)
        row += number
    if rows == "shuffled":
        order = rng.permutation(shape.rows)
        q_sequence, q_positions = q_sequence[order], q_positions[order]

    num_pages = shape.sequences * shape.entries
    first_page = int(rng.integers(0, 3)) * 2
    page_table = rng.permutation(num_pages).reshape(shape.sequences, shape.entries)
    shared = rng.integers(0, shape.entries)
    whole = kv_lengths >= shared * shape.page_size  # these have read a common prefix
    page_table[whole, :shared] = page_table[np.argmax(whole), :shared]
    k_pages, v_pages = np.full((2, num_pages + 4, shape.page_size, shape.kv_heads, shape.size), np.nan)
    for sequence, length in enumerate(kv_lengths):
        for entry in range(-(-length // shape.page_size)):
            page = first_page + page_table[sequence, entry]
            slots = slice(0, min(shape.page_size, length - entry * shape.page_size))
            fresh = rng.standard_normal((2, *k_pages[page, slots].shape))
            k_pages[page, slots], v_pages[page, slots] = np.where(
                np.isnan(k_pages[page, slots]), fresh, (k_pages[page, slots], v_pages[page, slots])
            )
    unused = np.arange(shape.entries) * shape.page_size >= kv_lengths[:, None]
    page_table = np.where(unused, 10**6, page_table)
    metadata = {
        "page_table": page_table,
        "page_index": np.where(unused, 2**31 - 1, np.arange(shape.entries)) if shape.index_given else None,
        "kv_lengths": kv_lengths,
        "q_positions": q_positions,
        "q_sequence": q_sequence,
        "first_page": first_page,
    }
    return Case(rng.standard_normal((shape.rows, shape.heads, shape.size)), k_pages, v_pages, metadata)


compiled = jax.jit(paged_attention, static_argnames=("implementation", "out_dtype"))


def run(case: Case, dtype: object, implementation: str, bits: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) as float64; computed in `dtype`, asked for in float32 or wider."""
    q, k_pages, v_pages = (jnp.asarray(x, dtype) for x in case[:3])
    if bits:
        k_pages, v_pages = to_bits(k_pages), to_bits(v_pages)
    metadata = {name: None if x is None else jnp.asarray(x, jnp.int32) for name, x in case.metadata.items()}
    out, lse = compiled(
        q, k_pages, v_pages, **metadata, implementation=implementation, out_dtype=jnp.promote_types(dtype, jnp.float32)
    )
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def dense(case: Case, dtype: object, implementation: str = "reference") -> tuple[np.ndarray, np.ndarray]:
    """The same by `attention` to the contiguous keys of each sequence: one batch entry a sequence."""
    table, lengths = case.metadata["page_table"], case.metadata["kv_lengths"]
    num_pages = case.k_pages.shape[0]
    pages = np.minimum(table + case.metadata["first_page"], num_pages - 1)
    keys, values = (np.nan_to_num(x[pages].reshape(len(table), -1, *x.shape[2:])) for x in (case.k_pages, case.v_pages))
    batch, rows = len(table), len(case.q)
    sequences = np.arange(batch)[:, None]
    segments = np.where(np.arange(keys.shape[1])[None] < lengths[:, None], sequences, -1)
    out, lse = attention(
        *(jnp.asarray(x, dtype) for x in (np.broadcast_to(case.q, (batch, *case.q.shape)), keys, values)),
        q_positions=np.broadcast_to(case.metadata["q_positions"], (batch, rows)),
        kv_positions=np.broadcast_to(np.arange(keys.shape[1]), keys.shape[:2]),
        q_segment_ids=np.where(case.metadata["q_sequence"] == sequences, sequences, -1),
        kv_segment_ids=segments,
        implementation=implementation,
    )
    out, lse = merge_states(out, lse)  # all but one entry of the batch are empty for a row
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    with jax.enable_x64(True):
        return run(case, jnp.float64, "reference")


def error(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> float:
    """Largest difference; a row that sees nothing is exactly (0, -inf) in both."""
    empty = np.isneginf(want[1])
    np.testing.assert_array_equal(np.isneginf(got[1]), empty)
    assert np.isfinite(got[0]).all()
    assert not got[0][empty].any()
    lse = np.abs(got[1][~empty] - want[1][~empty])
    return float(max(np.max(np.abs(got[0] - want[0]), initial=0.0), np.max(lse, initial=0.0)))


@given(cases(SHAPES[:1]))
@settings(max_examples=10)
def test_reference_is_attention_to_contiguous_keys(case: Case) -> None:
    with jax.enable_x64(True):
        assert error(run(case, jnp.float64, "reference"), dense(case, jnp.float64)) < 1e-13


@given(cases())
@settings(max_examples=40)
def test_float32_agrees_with_oracle(case: Case) -> None:
    assert error(run(case, jnp.float32, "xla"), oracle(case)) < 1e-5


@pytest.mark.parametrize("bits", [False, True])
@given(case=cases(SHAPES[3:]))
@settings(max_examples=10)
def test_bfloat16_is_as_good_as_dense(case: Case, bits: bool) -> None:
    """Within 2.5x the error of the dense computation on the same rounded inputs, plus 2e-3; kept as bits or not."""
    want = oracle(case)
    got = run(case, jnp.bfloat16, "xla", bits)
    assert error(got, want) <= 2.5 * error(run(case, jnp.bfloat16, "reference", bits), want) + 2e-3


@given(cases(SHAPES[3:]))
@settings(max_examples=5)
def test_float64_is_honoured(case: Case) -> None:
    with jax.enable_x64(True):
        assert error(run(case, jnp.float64, "xla"), oracle(case)) < 1e-13


@given(cases(SHAPES[:1]), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_ranks_with_some_of_the_pages_merge_to_the_whole(case: Case, ranks: int, seed: int) -> None:
    """Pages dealt over ranks in any way; each has gaps in its page index, and lists its own pages only."""
    want = oracle(case)
    metadata, rng = case.metadata, np.random.default_rng(seed)
    owner = rng.integers(0, ranks, metadata["page_table"].shape)
    states = []
    for rank in range(ranks):
        order = np.argsort(owner != rank, axis=1, kind="stable")  # its own come first
        own = np.take_along_axis(owner == rank, order, 1)
        table = np.where(own, np.take_along_axis(metadata["page_table"], order, 1), -(10**6))
        index = np.where(own, np.take_along_axis(metadata["page_index"], order, 1), 2**31 - 1)
        part = case._replace(metadata=metadata | {"page_table": table, "page_index": index})
        states.append(run(part, jnp.float32, "xla"))
    outs, lses = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*states, strict=True))
    assert error(tuple(np.asarray(x, np.float64) for x in merge_states(outs, lses)), want) < 1e-5


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(("rows", "entries", "pages"), [(0, 3, 4), (3, 0, 4), (3, 3, 0)])
def test_nobody_to_ask_or_nothing_to_see(implementation: str, rows: int, entries: int, pages: int) -> None:
    q, k_pages = jnp.ones((rows, 4, 8), jnp.bfloat16), jnp.ones((pages, 2, 2, 8), jnp.bfloat16)
    table, zeros = jnp.zeros((1, entries), int), jnp.zeros(rows, int)
    out, lse = paged_attention(
        q, k_pages, k_pages, table, None, jnp.zeros(1, int), zeros, zeros, implementation=implementation
    )
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:2], jnp.float32)
    assert not out.any()
    assert bool((lse == -jnp.inf).all())


@functools.partial(jax.jit, donate_argnums=(0, 1))
def write(k_pages, v_pages, k, v, page, offset):  # type: ignore[no-untyped-def]
    return write_pages(k_pages, v_pages, k, v, page, offset)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "bfloat16"]))
@settings(max_examples=15)
def test_write_pages_is_numpy_assignment(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    pages, page_size = 6, 5
    k_pages, v_pages = rng.standard_normal((2, pages, page_size, 2, 4)).astype(np.float32)
    k, v = rng.standard_normal((2, 17, 2, 4)).astype(np.float32)
    slots = rng.permutation(pages * page_size)[:17]
    page, offset = slots // page_size, slots % page_size
    page[rng.random(17) < 0.3] = rng.choice([-1, -pages, -(2**31), pages, 2**31 - 1])  # dropped
    real = (page >= 0) & (page < pages)
    arrays = [jnp.asarray(x, dtype) for x in (k_pages, v_pages, k, v)]
    want = [np.array(x, np.float32) for x in arrays]
    want[0][page[real], offset[real]], want[1][page[real], offset[real]] = want[2][real], want[3][real]
    arrays = [to_bits(x) for x in arrays[:2]] + arrays[2:]
    for got, expected in zip(write(*arrays, page, offset), want[:2], strict=True):
        got = jax.lax.bitcast_convert_type(got, jnp.bfloat16) if dtype == "bfloat16" else got
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


Q, PAGES = jnp.ones((6, 4, 8)), jnp.ones((5, 3, 2, 8))
CALL = {
    "q": Q,
    "k_pages": PAGES,
    "v_pages": PAGES,
    "page_table": np.zeros((2, 4), int),
    "page_index": None,
    "kv_lengths": np.zeros(2, int),
    "q_positions": np.arange(6),
    "q_sequence": np.zeros(6, int),
}


@pytest.mark.parametrize(
    ("arguments", "refusal", "message"),
    [
        ({"q": np.ones((6, 4, 8))}, TypeError, "q must be a jax.Array, got ndarray"),
        ({"q": Q[0]}, ValueError, r"q must have a shape \[T, N, H\]"),
        ({"q": Q.astype(int)}, TypeError, "q must be floating point of 16 bits or more, got int32"),
        ({"q": Q[:, :3]}, ValueError, "multiple of k_pages' heads"),
        ({"q": Q[..., :7]}, ValueError, "head size of q, 7, got 8"),
        ({"k_pages": PAGES[0]}, ValueError, "k_pages must have a shape"),
        ({"v_pages": PAGES[1:]}, ValueError, "k_pages and v_pages must have one shape"),
        ({"v_pages": PAGES.astype(jnp.bfloat16)}, TypeError, "v_pages must have the dtype of q, float32; got bfloat16"),
        ({"k_pages": PAGES.astype(jnp.uint16)}, TypeError, "k_pages must have the dtype of q, float32; got uint16"),
        ({"k_pages": PAGES[:, :0], "v_pages": PAGES[:, :0]}, ValueError, "k_pages must have a page size"),
        ({"page_table": np.zeros(4, int)}, ValueError, r"page_table must have a shape \[B, M\]"),
        ({"page_table": np.zeros((2, 4))}, TypeError, "page_table must be integers"),
        ({"page_index": np.zeros((2, 3), int)}, ValueError, r"page_index must have the shape \(2, 4\)"),
        ({"kv_lengths": np.zeros(3, int)}, ValueError, r"kv_lengths must have the shape \(2,\)"),
        ({"kv_lengths": np.full(2, 2**31)}, ValueError, "kv_lengths must fit into int32"),
        ({"q_positions": np.arange(6.0)}, TypeError, "q_positions must be integers"),
        ({"q_sequence": np.zeros(5, int)}, ValueError, r"q_sequence must have the shape \(6,\)"),
        ({"first_page": np.zeros(1, int)}, ValueError, r"first_page must have the shape \(\)"),
        ({"first_page": 0.5}, TypeError, "first_page must be integers"),
        ({"scale": float("inf")}, ValueError, "scale must be a finite number"),
        ({"implementation": "fast"}, ValueError, r"implementation must be None or one of \['reference', 'xla'\]"),
        ({"out_dtype": int}, TypeError, "out_dtype must be a floating-point type"),
    ],
)
def test_refuses(arguments: dict[str, Any], refusal: type[Exception], message: str) -> None:
    with pytest.raises(refusal, match=message):
        paged_attention(**(CALL | arguments))


@pytest.mark.parametrize(
    ("arguments", "refusal", "message"),
    [
        ({"k": jnp.ones((6, 2, 7))}, ValueError, "k must have the shape"),
        ({"v": jnp.ones((5, 2, 8))}, ValueError, "v must have the shape"),
        ({"v": jnp.ones((6, 2, 8), jnp.bfloat16)}, TypeError, "k and v must have one dtype"),
        ({"v_pages": PAGES.astype(jnp.uint16)}, TypeError, "v_pages must have the dtype of k, float32; got uint16"),
        ({"page": np.zeros(5, int)}, ValueError, r"page must have the shape \(6,\)"),
        ({"offset": np.zeros(6)}, TypeError, "offset must be integers"),
    ],
)
def test_write_pages_refuses(arguments: dict[str, Any], refusal: type[Exception], message: str) -> None:
    new, zeros = jnp.ones((6, 2, 8)), np.zeros(6, int)
    call = {"k_pages": PAGES, "v_pages": PAGES, "k": new, "v": new, "page": zeros, "offset": zeros}
    with pytest.raises(refusal, match=message):
        write_pages(**(call | arguments))
