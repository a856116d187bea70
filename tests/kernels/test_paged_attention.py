"""`paged_attention` against the float64 oracle for each implementation, `write_pages` against numpy."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_attention_test_base import PagedAttentionTestBase
from paged_cases import RULES, SHAPES, Case, Shape, cases, dense, error, make_case, run

from longctx.kernels import paged_attention, plan_paged_attention, write_pages
from longctx.kernels.bits import to_bits
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.triton import adapter as triton


@given(cases(SHAPES[:1], tuple(RULES)))
@settings(max_examples=5)
def test_reference_is_attention_to_contiguous_keys(case: Case) -> None:
    with jax.enable_x64(True):
        assert error(run(case, jnp.float64, "reference"), dense(case, jnp.float64)) < 1e-13


def gradients(case: Case, dtype: Any, implementation: str) -> list[np.ndarray]:
    """Gradients of q, k_pages and v_pages, as float64."""

    def weighted(*arrays: jax.Array) -> jax.Array:
        out, lse = paged_attention(*arrays, **metadata, **RULES[case.rule], implementation=implementation)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse == -jnp.inf, 0, lse)))

    metadata = {name: None if x is None else jnp.asarray(x, jnp.int32) for name, x in case.metadata.items()}
    arrays = [jnp.asarray(x, dtype) for x in case[:3]]
    return [np.asarray(x, np.float64) for x in jax.jit(jax.grad(weighted, (0, 1, 2)))(*arrays)]


def check_gradients(case: Case, dtype: Any, implementation: str, bound: float) -> None:
    """The bound is relative to the size: a shared page sums over sequences."""
    with jax.enable_x64(True):
        want = gradients(case, jnp.float64, "reference")
    for one, other in zip(gradients(case, dtype, implementation), want, strict=True):
        assert np.abs(one - other).max() <= bound * np.abs(other).max(initial=1.0)


@given(cases((SHAPES[0], SHAPES[3]), tuple(RULES)))
@settings(max_examples=4)
def test_gradients_through_pages(case: Case) -> None:
    check_gradients(case, jnp.float32, "xla", 2e-5)


@pytest.mark.slow
@given(cases((SHAPES[0], SHAPES[3]), tuple(RULES)))
@settings(max_examples=6)
def test_gradients_through_pages_of_triton(case: Case) -> None:
    with triton.interpreted():
        check_gradients(case, jnp.float32, "triton", 2e-5)


@pytest.mark.slow
@given(cases(SHAPES, tuple(RULES)))
@settings(max_examples=40)
def test_gradients_through_pages_of_any_shape(case: Case) -> None:
    check_gradients(case, jnp.float32, "xla", 2e-5)


@pytest.mark.slow
@given(cases(SHAPES[3:], ("first and window",)))
@settings(max_examples=3)
def test_gradients_through_pages_by_triton(case: Case) -> None:
    with triton.interpreted():
        check_gradients(case, jnp.float32, "triton", 2e-5)


def test_gradients_of_pages_of_bits_and_of_fp8() -> None:
    """Bits have none, q has; FP8 pages say that there is none."""
    case = make_case(SHAPES[3], np.random.default_rng(0), np.full(4, 30), np.arange(5) % 4, np.full(5, 29))
    q, k_pages, v_pages = (jnp.nan_to_num(jnp.asarray(x, jnp.bfloat16)) for x in case[:3])

    def loss(q: jax.Array, *pages: jax.Array, **scales: jax.Array) -> jax.Array:
        return jnp.sum(paged_attention(q, *pages, **case.metadata, **scales)[0].astype(jnp.float32))

    got = jax.grad(loss)(q, to_bits(k_pages), to_bits(v_pages))
    np.testing.assert_array_equal(got, jax.grad(loss)(q, k_pages, v_pages))
    fp8, scale = k_pages.astype(jnp.float8_e4m3fn), jnp.ones((len(k_pages), 2, 1))
    with pytest.raises(NotImplementedError, match="paged_attention has no gradient where pages are FP8"):
        jax.grad(loss)(q, fp8, fp8, k_scale=scale, v_scale=scale)


class TestXla(PagedAttentionTestBase):
    implementation = "xla"
    examples, half_examples, merge_examples = 5, 2, 2


class TestTriton(PagedAttentionTestBase):
    """Interpreted on the CPU, where three workers share the blocks; compiling a shape takes seconds."""

    implementation = "triton"
    rules = ("causal", "first and window")
    shapes, half_shapes = SHAPES[:1], SHAPES[2:3]
    examples, half_examples, merge_examples = 4, 2, 1
    supports_float64 = False

    def where(self) -> contextlib.AbstractContextManager[None]:
        return triton.interpreted()


# Head sizes of one piece, of two, and of the largest; pages that divide no block; groups of one tile, and of several.
TRITON_SHAPES = (
    *SHAPES,
    Shape(rows=50, heads=6, kv_heads=2, size=16, page_size=48, sequences=4, entries=5, index_given=True),
    Shape(rows=70, heads=5, kv_heads=1, size=80, page_size=16, sequences=3, entries=20, index_given=True),
    Shape(rows=9, heads=260, kv_heads=2, size=96, page_size=128, sequences=3, entries=2, index_given=False),
    Shape(rows=40, heads=2, kv_heads=2, size=192, page_size=256, sequences=2, entries=2, index_given=True),
    Shape(rows=30, heads=8, kv_heads=1, size=256, page_size=32, sequences=6, entries=6, index_given=False),
)


@pytest.mark.slow
class TestTritonShapes(TestTriton):
    rules = tuple(RULES)
    shapes = half_shapes = TRITON_SHAPES
    examples, half_examples, merge_examples = 60, 60, 10


# Pages smaller and larger than a block of keys; sequences that end in mid page.
MOSAIC_GPU_SHAPES = (
    Shape(rows=60, heads=3, kv_heads=1, size=64, page_size=16, sequences=4, entries=12, index_given=True),
    Shape(rows=20, heads=1, kv_heads=1, size=64, page_size=256, sequences=3, entries=2, index_given=False),
    Shape(rows=5, heads=4, kv_heads=1, size=128, page_size=64, sequences=4, entries=5, index_given=False),
)


class TestMosaicGpu(PagedAttentionTestBase):
    """In the interpreter, which takes seconds for a thread block."""

    rules = ("causal", "window", "first")
    implementation = "mosaic_gpu"
    half_shapes = (MOSAIC_GPU_SHAPES[0]._replace(rows=20, heads=1),)
    half_examples, merge_examples = 1, 0  # parts are merged below
    supports_float32 = supports_float64 = jit = False

    @pytest.mark.slow
    @pytest.mark.parametrize("max_rows_per_sequence", [1, 2])
    def test_a_plan_for_fewer_rows_than_a_sequence_has(self, max_rows_per_sequence: int) -> None:
        super().test_a_plan_for_fewer_rows_than_a_sequence_has(max_rows_per_sequence)

    def where(self) -> contextlib.AbstractContextManager[None]:
        return adapter.interpreted()


@pytest.mark.slow
class TestMosaicGpuShapes(TestMosaicGpu):
    shapes = half_shapes = MOSAIC_GPU_SHAPES
    half_examples, merge_examples = 4, 2


def mixed_rows(group: int, rows: tuple[int, ...]) -> Case:
    """One sequence for each number of rows, which are its last; of unequal lengths."""
    shape = Shape(sum(rows), group, 1, 64, page_size=16, sequences=len(rows), entries=3, index_given=False)
    rng = np.random.default_rng(group)
    kv_lengths = rng.integers(max(rows), 3 * 16 + 1, len(rows))
    positions = [np.arange(length - number, length) for number, length in zip(rows, kv_lengths, strict=True)]
    return make_case(shape, rng, kv_lengths, np.repeat(np.arange(len(rows)), rows), np.concatenate(positions))


@pytest.mark.parametrize("rows", [(1, 16), pytest.param((1, 1, 1), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "group", [3, *(pytest.param(group, marks=pytest.mark.slow) for group in (1, 4, 5, 7, 8))], ids="group {}".format
)
def test_mosaic_gpu_decodes_beside_chunks(group: int, rows: tuple[int, ...]) -> None:
    """Sequences whose rows are no multiples of 8: in the interpreter a copy that begins within a tile raises."""
    TestMosaicGpu().check_half(mixed_rows(group, rows), jnp.bfloat16, False)


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
    offset[rng.random(17) < 0.2] = rng.choice([-1, -page_size, -(2**31), page_size, 2**31 - 1])  # dropped
    real = (page >= 0) & (page < pages) & (offset >= 0) & (offset < page_size)
    arrays = [jnp.asarray(x, dtype) for x in (k_pages, v_pages, k, v)]
    want = [np.array(x, np.float32) for x in arrays]
    want[0][page[real], offset[real]], want[1][page[real], offset[real]] = want[2][real], want[3][real]
    arrays = [to_bits(x) for x in arrays[:2]] + arrays[2:]
    for got, expected in zip(write(*arrays, page, offset), want[:2], strict=True):
        got = jax.lax.bitcast_convert_type(got, jnp.bfloat16) if dtype == "bfloat16" else got
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


@pytest.mark.parametrize("wrong", [True, 0, -1, 1.5, "1"])
def test_max_rows_per_sequence_must_be_a_positive_integer(wrong: Any) -> None:
    pages, zeros = jnp.ones((5, 3, 2, 8)), np.zeros(6, int)
    with pytest.raises(ValueError, match="max_rows_per_sequence must be an integer of 1 or more"):
        plan_paged_attention(
            4, pages, np.zeros((2, 2), int), None, np.zeros(2, int), zeros, zeros, max_rows_per_sequence=wrong
        )


def test_more_blocks_than_int32_counts_are_refused() -> None:
    pages = jax.ShapeDtypeStruct((1 << 20, 256, 8, 128), jnp.bfloat16)
    table, one, rows = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1 << 16), (1,), (1 << 16,)))

    def plan(table: Any, lengths: Any, positions: Any, sequence: Any) -> Any:
        return plan_paged_attention(128, pages, table, None, lengths, positions, sequence)

    with (
        adapter.interpreted(),
        pytest.raises(NotImplementedError, match="65536 rows of q with 128 heads over 16777216"),
    ):
        jax.eval_shape(plan, table, one, rows, rows)


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
PLAN = plan_paged_attention(4, PAGES, *[*CALL.values()][3:])


@pytest.mark.parametrize(
    ("arguments", "refusal", "message"),
    [
        ({"q": 1.0}, TypeError, "q must be a jax.Array or numpy.ndarray, got float"),
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
        ({"q_first": np.zeros(5, int)}, ValueError, r"q_first must have the shape \(6,\)"),
        ({"q_first": np.zeros(6)}, TypeError, "q_first must be integers"),
        ({"q_first": np.zeros(6, int), "plan": PLAN}, ValueError, "q_first must be given both with a plan and to"),
        ({"first_page": np.zeros(1, int)}, ValueError, r"first_page must have the shape \(\)"),
        ({"first_page": 0.5}, TypeError, "first_page must be integers"),
        ({"scale": float("inf")}, ValueError, "scale must be a finite number"),
        (
            {"implementation": "fast"},
            ValueError,
            r"implementation must be None, one of \['mosaic_gpu', 'reference', 'triton', 'xla'\], or",
        ),
        ({"out_dtype": int}, TypeError, "out_dtype must be a floating-point type"),
        ({"plan": 3}, TypeError, "plan must be what plan_paged_attention returns, got int"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], refusal: type[Exception], message: str) -> None:
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
def test_wrong_arguments_of_write_pages_are_named(
    arguments: dict[str, Any], refusal: type[Exception], message: str
) -> None:
    new, zeros = jnp.ones((6, 2, 8)), np.zeros(6, int)
    call = {"k_pages": PAGES, "v_pages": PAGES, "k": new, "v": new, "page": zeros, "offset": zeros}
    with pytest.raises(refusal, match=message):
        write_pages(**(call | arguments))
