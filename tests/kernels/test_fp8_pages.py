"""FP8 pages: `write_pages` against NumPy, and `paged_attention` against the float64 oracle over the rounded keys."""

import functools
from typing import Any

import fp8_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import SHAPES, Case, Shape, cases, error, oracle, planned, run

from longctx.kernels import explain, paged_attention, plan_paged_attention, write_pages
from longctx.kernels.fp8_rows import dequantize_rows, join_packed, pack_rows, split_packed, unpack_rows
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.tile_config import HEAD_SIZES, TileConfig
from longctx.kernels.selection import Selection
from longctx.kernels.triton import adapter as triton
from longctx.kernels.triton.e4m3 import dequantize_pairs

attend = jax.jit(paged_attention, static_argnames=("implementation", "out_dtype"))


def fp8_case(case: Case) -> tuple[Case, dict[str, np.ndarray]]:
    """A case as it is in FP8: with rounded keys, and the arguments of `paged_attention` that hold them.

    In slots that were never written both values and scales are NaN.
    """
    arguments, rounded = {}, []
    for name, pages in (("k", case.k_pages), ("v", case.v_pages)):
        values, scale = fp8_numpy.quantize(pages)
        arguments |= {f"{name}_pages": values, f"{name}_scale": np.swapaxes(scale, 1, 2)}
        rounded.append(fp8_numpy.round_rows(pages))
    return Case(case.q, *rounded, case.metadata), arguments


def run_fp8(
    case: Case, pages: dict[str, np.ndarray], dtype: Any, implementation: str, attend: Any = attend
) -> tuple[np.ndarray, np.ndarray]:
    metadata = {name: None if x is None else jnp.asarray(x, jnp.int32) for name, x in case.metadata.items()}
    bits = {name: x.view(np.uint8) if name.endswith("pages") else x for name, x in pages.items()}
    wide = jnp.promote_types(dtype, jnp.float32)
    q = jnp.asarray(case.q, dtype)
    if attend is paged_attention:  # without `jax.jit`, but for the plan, whose operations would compile one by one
        tables = [x for name, x in metadata.items() if name != "first_page"]
        plan = planned(q.shape[1], bits["k_pages"], *tables, implementation=implementation, q_dtype=q.dtype)
        metadata["plan"] = plan
    out, lse = attend(q, **bits, **metadata, implementation=implementation, out_dtype=wide)
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


@pytest.mark.parametrize(("implementation", "shapes"), [("xla", SHAPES), ("reference", SHAPES[3:])])
@given(data=st.data())
@settings(max_examples=4)
def test_float32_agrees_with_oracle(implementation: str, shapes: list[Shape], data: st.DataObject) -> None:
    case = data.draw(cases(shapes))
    rounded, pages = fp8_case(case)
    assert error(run_fp8(case, pages, jnp.float32, implementation), oracle(rounded)) < 1e-5


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@given(case=cases(SHAPES[3:]))
@settings(max_examples=2)
def test_float64_is_honoured(implementation: str, case: Case) -> None:
    rounded, pages = fp8_case(case)
    with jax.enable_x64(True):
        assert error(run_fp8(case, pages, jnp.float64, implementation), oracle(rounded)) < 1e-13


@given(case=cases(SHAPES[3:]), dtype=st.sampled_from(["bfloat16", "float16"]))
@settings(max_examples=4)
def test_half_precision_is_as_good_as_dense(case: Case, dtype: str) -> None:
    rounded, pages = fp8_case(case)
    want, dense = oracle(rounded), run(rounded, dtype, "reference")
    assert error(run_fp8(case, pages, dtype, "xla"), want) <= 2.5 * error(dense, want) + 2e-3
    # The values of keys are those of the dense computation to the last bit.
    assert error(run_fp8(case, pages, dtype, "reference"), dense) < 1e-6


# Pages smaller and larger than a block of keys, groups whose rows are no multiple of 8.
MOSAIC_GPU_SHAPES = (
    Shape(rows=7, heads=3, kv_heads=1, size=64, page_size=32, sequences=2, entries=3, index_given=True),
    Shape(rows=9, heads=4, kv_heads=1, size=128, page_size=256, sequences=2, entries=2, index_given=False),
    Shape(rows=7, heads=2, kv_heads=1, size=256, page_size=64, sequences=3, entries=3, index_given=False),
)


@pytest.mark.parametrize(
    "shape", [MOSAIC_GPU_SHAPES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in MOSAIC_GPU_SHAPES[1:])], ids=str
)
@given(data=st.data(), dtype=st.sampled_from(["bfloat16", "float16"]))
@settings(max_examples=1)
def test_mosaic_gpu_is_as_good_as_dense(shape: Shape, data: st.DataObject, dtype: str) -> None:
    """In the interpreter, where a converter warpgroup rounds to the same values of keys."""
    case = data.draw(cases((shape,)))
    rounded, pages = fp8_case(case)
    with adapter.interpreted():
        got = run_fp8(case, pages, dtype, "mosaic_gpu", paged_attention)
    want = oracle(rounded)
    assert error(got, want) <= 2.5 * error(run(rounded, dtype, "reference"), want) + 2e-3


# Pieces of words; a head size that is no power of two, pages that divide no block.
TRITON_SHAPES = (
    Shape(rows=20, heads=6, kv_heads=2, size=24, page_size=16, sequences=3, entries=8, index_given=True),
    Shape(rows=9, heads=4, kv_heads=1, size=128, page_size=48, sequences=2, entries=3, index_given=False),
    Shape(rows=40, heads=2, kv_heads=2, size=256, page_size=64, sequences=3, entries=3, index_given=True),
)


@pytest.mark.parametrize(
    "shape", [TRITON_SHAPES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in TRITON_SHAPES[1:])], ids=str
)
@given(data=st.data(), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=2)
def test_triton_is_as_good_as_dense(shape: Shape, data: st.DataObject, dtype: str) -> None:
    """It converts by integer arithmetic, to the same values of keys."""
    case = data.draw(cases((shape,)))
    rounded, pages = fp8_case(case)
    with triton.interpreted():
        got = run_fp8(case, pages, dtype, "triton")
    want = oracle(rounded)
    limit = 1e-5 if dtype == "float32" else 2.5 * error(run(rounded, dtype, "reference"), want) + 2e-3
    assert error(got, want) <= limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_triton_converts_as_rows_are_dequantised(dtype: str) -> None:
    """Every value of 8 bits, NaN and subnormals too, with scales of which some products are subnormal."""
    bits = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    scale = np.array([1.0, 0.37, 3e-8, 2e3], np.float32)
    low, high = dequantize_pairs(jnp.asarray(bits.view(np.uint16)), jnp.asarray(scale)[:, None], dtype)
    want = dequantize_rows(jnp.asarray(bits), jnp.asarray(scale), dtype)
    got = jnp.stack([low, high], -1).reshape(want.shape)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


def random_rows(seed: int, *shape: int) -> np.ndarray:
    """Rows of very different sizes, one of zeros, one far below the least scale."""
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal(shape) * np.exp(rng.normal(0, 4, (*shape[:-1], 1)))).astype(np.float32)
    rows[0], rows[1] = 0, 1e-30
    return rows


@given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=12)
def test_rows_are_those_of_numpy(seed: int, dtype: str) -> None:
    x = jnp.asarray(np.clip(random_rows(seed, 9, 2, 24), -6e4, 6e4), dtype)
    packed = jax.jit(pack_rows)(x)
    bits, scale = split_packed(packed)
    values, expected_scale = fp8_numpy.quantize(np.asarray(x))
    np.testing.assert_array_equal(bits, values.view(np.uint8))
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(join_packed(bits, scale), packed)
    worth = jax.jit(unpack_rows, static_argnums=1)(packed, dtype)
    products = values.astype(np.float32) * expected_scale[..., None]
    rounded = products.astype(worth.dtype)
    rounded[np.abs(rounded) < jnp.finfo(dtype).smallest_normal] = 0
    np.testing.assert_array_equal(worth, rounded)
    # Also where it is widened again: XLA may not drop the rounding.
    widened = jax.jit(lambda x: dequantize_rows(*split_packed(x), dtype).astype(jnp.float32))(packed)
    np.testing.assert_array_equal(widened, np.asarray(worth, np.float32))
    assert (np.abs(np.asarray(worth, np.float64) - np.asarray(x, np.float64)) <= half_step(x)).all()


def half_step(x: Any) -> np.ndarray:
    """The most by which a value may be off: docs/fp8.md, and the rounding to x.dtype."""
    wide = np.abs(np.asarray(x, np.float64))
    scale = np.maximum(wide.max(-1, keepdims=True), 1e-12) / 448
    eps = float(jnp.finfo(x.dtype).eps)
    return np.maximum(wide / 16, scale / 1024) * (1 + 1e-6) + wide * eps + float(jnp.finfo(x.dtype).smallest_normal)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_and_others_are_not(bad: float) -> None:
    x = random_rows(0, 5, 2, 8)
    x[3, 1, 4] = bad
    worth = np.array(jax.jit(lambda x: unpack_rows(pack_rows(x), jnp.float32))(x))
    assert np.isnan(worth[3, 1]).all()
    worth[3, 1] = 0
    assert np.isfinite(worth).all()


@functools.partial(jax.jit, donate_argnums=(0, 1, 6, 7))
def write(*arguments: Any) -> tuple[jax.Array, ...]:
    return write_pages(*arguments)


@pytest.mark.parametrize("page_dtype", ["uint8", "float8_e4m3fn"])
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float32", "bfloat16"]))
@settings(max_examples=6)
def test_write_pages_is_numpy_assignment(page_dtype: str, seed: int, dtype: str) -> None:
    rng, (pages, page_size, kv_heads, size) = np.random.default_rng(seed), (6, 5, 2, 4)
    before = [rng.integers(0, 256, (pages, page_size, kv_heads, size)).astype(np.uint8) for _ in range(2)]
    scales = [rng.random((pages, kv_heads, page_size)).astype(np.float32) for _ in range(2)]
    rows = [jnp.asarray(random_rows(seed + n, 17, kv_heads, size), dtype) for n in range(2)]
    slots = rng.permutation(pages * page_size)[:17]
    page, offset = slots // page_size, slots % page_size
    page[rng.random(17) < 0.3] = rng.choice([-1, -pages, -(2**31), pages, 2**31 - 1])  # dropped
    offset[rng.random(17) < 0.2] = rng.choice([-1, -page_size, page_size])  # dropped
    real = (page >= 0) & (page < pages) & (offset >= 0) & (offset < page_size)
    expected = [x.copy() for x in before + scales]
    for n, row in enumerate(rows):
        values, scale = fp8_numpy.quantize(np.asarray(row))
        expected[n][page[real], offset[real]] = values.view(np.uint8)[real]
        expected[2 + n][page[real], :, offset[real]] = scale[real]
    given_pages = [jnp.asarray(x.view(page_dtype)) for x in before]
    for got, want in zip(write(*given_pages, *rows, page, offset, *scales), expected, strict=True):
        assert got.dtype == (page_dtype if want.dtype == np.uint8 else np.float32)
        np.testing.assert_array_equal(np.asarray(got).view(want.dtype), want)


Q, PAGES, SCALE = jnp.ones((6, 4, 8)), jnp.zeros((5, 3, 2, 8), jnp.uint8), jnp.ones((5, 2, 3))
SWAPPED = jnp.swapaxes(SCALE, 1, 2)
CALL: dict[str, Any] = {
    "q": Q,
    "k_pages": PAGES,
    "v_pages": PAGES,
    "page_table": np.zeros((2, 4), int),
    "page_index": None,
    "kv_lengths": np.zeros(2, int),
    "q_positions": np.arange(6),
    "q_sequence": np.zeros(6, int),
    "k_scale": SCALE,
    "v_scale": SCALE,
}
FLOATS = PAGES.astype(jnp.float32)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k_scale": None}, ValueError, "k_scale must be given where the other scale is"),
    ({"v_scale": None}, ValueError, "v_scale must be given where the other scale is"),
    ({"k_scale": None, "v_scale": None}, TypeError, "k_pages of uint8 needs k_scale and v_scale"),
    (
        {"k_scale": SCALE[:4]},
        ValueError,
        r"k_scale must have the shape \[pages, K, page_size\] .*, got \(4, 2, 3",
    ),
    (
        {"v_scale": SWAPPED},
        ValueError,
        r"v_scale must have the shape .* \(5, 2, 3\), got \(5, 3, 2\)",
    ),
    ({"v_scale": SCALE.astype(jnp.bfloat16)}, TypeError, "v_scale must be float32, got bfloat16"),
    ({"k_scale": 1.0}, TypeError, "k_scale must be a jax.Array or numpy.ndarray, got float"),
    ({"k_pages": FLOATS, "v_pages": FLOATS}, TypeError, "k_pages must be float8_e4m3fn, or uint8, .* got float32"),
    ({"k_pages": PAGES.astype(jnp.float8_e5m2)}, TypeError, "k_pages must be float8_e4m3fn, .* got float8_e5m2"),
    ({"v_pages": PAGES.view(jnp.float8_e4m3fn)}, ValueError, "k_pages and v_pages must have one shape, .* one dtype"),
]


@pytest.mark.parametrize(("arguments", "refusal", "message"), WRONG)
def test_wrong_arguments_are_named(arguments: dict[str, Any], refusal: type[Exception], message: str) -> None:
    with pytest.raises(refusal, match=message):
        paged_attention(**(CALL | arguments))
    new, zeros = jnp.ones((6, 2, 8)), np.zeros(6, int)
    call = {name: CALL[name] for name in ("k_pages", "v_pages", "k_scale", "v_scale")}
    with pytest.raises(refusal, match=message):
        write_pages(**(call | arguments), k=new, v=new, page=zeros, offset=zeros)


def test_integer_rows_are_refused() -> None:
    new, zeros = jnp.ones((6, 2, 8), int), np.zeros(6, int)
    with pytest.raises(TypeError, match="k must be floating point of 16 bits or more, got int32"):
        write_pages(PAGES, PAGES, new, new, zeros, zeros, SCALE, SCALE)


def test_pages_of_float8_are_those_of_their_bits() -> None:
    """Also with a plan, which is made from the pages' type alone."""
    pages = jnp.asarray(np.random.default_rng(0).integers(0, 120, PAGES.shape).astype(np.uint8))
    lengths = np.array([12, 0])
    want = paged_attention(**(CALL | {"k_pages": pages, "v_pages": pages, "kv_lengths": lengths}))
    floats = pages.view(jnp.float8_e4m3fn)
    metadata = [CALL["page_table"], None, lengths, CALL["q_positions"], CALL["q_sequence"]]
    with pytest.raises(TypeError, match="q_dtype must be floating point"):
        plan_paged_attention(4, floats, *metadata, q_dtype=jnp.int32)
    plan = plan_paged_attention(4, floats, *metadata, q_dtype=jnp.float32)
    got = paged_attention(Q, floats, floats, *metadata, plan=plan, k_scale=SCALE, v_scale=SCALE)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_plan_is_for_fp8_pages_or_for_others() -> None:
    """The kernels take other tiles for them."""
    metadata = [CALL[name] for name in ("page_table", "page_index", "kv_lengths", "q_positions", "q_sequence")]
    wide = jnp.zeros(PAGES.shape)
    of_wide, of_fp8 = (plan_paged_attention(4, pages, *metadata, q_dtype=Q.dtype) for pages in (wide, PAGES))
    with pytest.raises(ValueError, match="plan must be for k_pages of uint8, got one for pages that are not FP8"):
        paged_attention(**CALL, plan=of_wide)
    with pytest.raises(ValueError, match="plan must be for k_pages of float32, got one for FP8 pages"):
        paged_attention(Q, wide, wide, *metadata, plan=of_fp8)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_tiles_of_fp8_pages_fit_into_a_multiprocessor(head_size: int) -> None:
    config = TileConfig.choose(head_size, 1000, fp8=True)
    multiplied = (config.block_q + 2 * config.num_stages * config.block_kv) * head_size * 2
    copied = 2 * config.num_fp8_stages * config.block_kv * (head_size + 4)
    assert multiplied + copied + 1024 <= 227 * 1024
    assert config.num_consumers == 1  # there is no room for the registers of another
    registers = config.registers
    assert registers is not None
    assert 128 * (registers.producer + registers.consumer + registers.converter) <= 65536


def test_explain_knows_fp8_pages() -> None:
    def explained(page_size: int) -> Selection:
        q, pages = (6, 4, 128), (5, page_size, 2, 128)
        return explain(jax.ShapeDtypeStruct(q, jnp.bfloat16), jax.ShapeDtypeStruct(pages, jnp.uint8), paged=True)

    assert explained(64).taken == "xla"
    with adapter.interpreted():
        assert [explained(size).taken for size in (32, 64, 128, 256)] == ["mosaic_gpu"] * 4
        assert explained(16).refused["mosaic_gpu"] == "needs FP8 pages of a multiple of 32 tokens, got 16"
