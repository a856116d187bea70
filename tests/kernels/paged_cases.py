"""Drawn ragged batches for `paged_attention`, and their results by the float64 oracle."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from longctx.kernels import attention, merge_states, paged_attention, plan_paged_attention
from longctx.kernels.bits import to_bits


class Shape(NamedTuple):
    """A shape, which compiles once; everything else about a case is data."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    page_size: int
    sequences: int
    entries: int
    index_given: bool  # or page_index=None
    value_size: int | None = None  # None: `size`


SHAPES = [
    Shape(rows=90, heads=8, kv_heads=2, size=8, page_size=16, sequences=5, entries=7, index_given=True),
    Shape(rows=300, heads=3, kv_heads=3, size=8, page_size=4, sequences=2, entries=90, index_given=False),
    Shape(rows=40, heads=8, kv_heads=1, size=24, page_size=64, sequences=3, entries=9, index_given=True, value_size=16),
    Shape(rows=5, heads=4, kv_heads=2, size=4, page_size=1, sequences=4, entries=33, index_given=False, value_size=9),
]


class Case(NamedTuple):
    """q and pages of float64; metadata as numpy arrays."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    metadata: dict[str, Any]
    rule: str = "causal"  # of RULES


# Static arguments, of which each compiles. Those of a "first" draw `q_first` too, which is data.
RULES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 21},
    "soft cap": {"window": (70, 3), "logits_soft_cap": 1.5},
    "first": {},
    "first and window": {"window": 45},
}


@st.composite
def cases(draw: st.DrawFn, shapes: Sequence[Shape] = SHAPES, rules: Sequence[str] = ("causal",)) -> Case:
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
    case = make_case(shape, rng, kv_lengths, q_sequence, q_positions)
    rule = draw(st.sampled_from(rules))
    if rule.startswith("first"):
        kind = draw(st.sampled_from(["window", "chunks", "any"]))
        limits = np.iinfo(np.int32)
        any_first = rng.choice([limits.min, limits.max, *rng.integers(0, longest + 1, 5)], shape.rows)
        first = {"window": q_positions - 20, "chunks": q_positions // 13 * 13, "any": any_first}[kind]
        case.metadata["q_first"] = first
    return case._replace(rule=rule)


def make_case(
    shape: Shape, rng: np.random.Generator, kv_lengths: np.ndarray, q_sequence: np.ndarray, q_positions: np.ndarray
) -> Case:
    """Random queries, and pages in random order of which some are shared; NaN where nothing is written."""
    num_pages = shape.sequences * shape.entries
    first_page = int(rng.integers(0, 3)) * 2
    page_table = rng.permutation(num_pages).reshape(shape.sequences, shape.entries)
    shared = rng.integers(0, shape.entries)
    whole = kv_lengths >= shared * shape.page_size  # these have read a common prefix
    page_table[whole, :shared] = page_table[np.argmax(whole), :shared]
    sizes = shape.size, shape.value_size or shape.size
    pools = [np.full((num_pages + 4, shape.page_size, shape.kv_heads, size), np.nan) for size in sizes]
    for sequence, length in enumerate(kv_lengths):
        for entry in range(-(-length // shape.page_size)):
            page = first_page + page_table[sequence, entry]
            slots = slice(0, min(shape.page_size, length - entry * shape.page_size))
            for pool in pools:
                old = pool[page, slots]
                pool[page, slots] = np.where(np.isnan(old), rng.standard_normal(old.shape), old)
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
    return Case(rng.standard_normal((shape.rows, shape.heads, shape.size)), *pools, metadata)


planned = jax.jit(plan_paged_attention, static_argnums=0, static_argnames=("window", "implementation", "q_dtype"))
compiled = jax.jit(paged_attention, static_argnames=("implementation", "out_dtype", "window", "logits_soft_cap"))


def run(
    case: Case, dtype: object, implementation: str, bits: bool = False, jit: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) as float64; computed in `dtype`, asked for in float32 or wider."""
    q, k_pages, v_pages = (jnp.asarray(x, dtype) for x in case[:3])
    if bits:
        k_pages, v_pages = to_bits(k_pages), to_bits(v_pages)
    metadata = {name: None if x is None else jnp.asarray(x, jnp.int32) for name, x in case.metadata.items()}
    call: Any = compiled
    if not jit:
        of_plan = {name: x for name, x in metadata.items() if name != "first_page"}
        of_plan |= {"window": RULES[case.rule].get("window"), "implementation": implementation, "q_dtype": q.dtype}
        plan = planned(q.shape[1], k_pages, **of_plan)
        call = functools.partial(paged_attention, plan=plan)
    out, lse = call(
        q,
        k_pages,
        v_pages,
        **metadata,
        **RULES[case.rule],
        implementation=implementation,
        out_dtype=jnp.promote_types(dtype, jnp.float32),
    )
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def dense(case: Case, dtype: object, implementation: str = "reference") -> tuple[np.ndarray, np.ndarray]:
    """The same by `attention` to the contiguous keys of each sequence, with one batch entry per sequence."""
    table, lengths = case.metadata["page_table"], case.metadata["kv_lengths"]
    num_pages = case.k_pages.shape[0]
    pages = np.minimum(table + case.metadata["first_page"], num_pages - 1)
    keys, values = (np.nan_to_num(x[pages].reshape(len(table), -1, *x.shape[2:])) for x in (case.k_pages, case.v_pages))
    batch, rows, first = len(table), len(case.q), case.metadata.get("q_first")
    sequences = np.arange(batch)[:, None]
    segments = np.where(np.arange(keys.shape[1])[None] < lengths[:, None], sequences, -1)
    out, lse = attention(
        *(jnp.asarray(x, dtype) for x in (np.broadcast_to(case.q, (batch, *case.q.shape)), keys, values)),
        q_positions=np.broadcast_to(case.metadata["q_positions"], (batch, rows)),
        kv_positions=np.broadcast_to(np.arange(keys.shape[1]), keys.shape[:2]),
        q_segment_ids=np.where(case.metadata["q_sequence"] == sequences, sequences, -1),
        kv_segment_ids=segments,
        **({"q_first": np.broadcast_to(first, (batch, rows))} if first is not None else {}),
        **RULES[case.rule],
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
