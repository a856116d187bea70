"""FP8 row-wise weights: the numbers of the format, and models against transformers with compressed-tensors."""

import dataclasses
from pathlib import Path
from typing import Any

import fp8_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from hf_reference import Case, greedy, logits
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from longctx.kernels.fp8 import E4M3, from_e4m3_bits, quantize_rows
from longctx.models import Llama, RowwiseFp8, load_checkpoint, save_checkpoint
from longctx.models.params import quantize_params
from longctx.models.projections import PartlyQuantized, RowQuantized
from longctx.parallel import make_mesh

INPUTS, OUTPUTS = 96, 40


def draw(seed: int, *shape: int, spread: float = 1.0) -> np.ndarray:
    """Normal numbers; rows (and columns, if `spread` is above 1) of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(-np.log(spread), np.log(spread), shape[-1])
    rows = np.exp(rng.normal(0, 2, shape[0])).reshape(-1, *[1] * (len(shape) - 1))
    return (rng.normal(0, 1, shape) * np.exp(sizes) * rows).astype(np.float32)


def make_weight(seed: int, *outputs: int, upper_bound: float | None = None) -> tuple[RowQuantized, np.ndarray]:
    weight = draw(seed, *outputs, INPUTS)
    values, scale = fp8_numpy.quantize(weight)
    return RowQuantized(jnp.asarray(values.view(np.uint8)), jnp.asarray(scale), upper_bound), weight


def no_pmax(x: jax.Array) -> jax.Array:
    return x


@given(st.integers(0, 999), st.sampled_from([1.0, 30.0, 1e6]), st.sampled_from([None, 3.0, 1200.0]), st.booleans())
def test_rows_are_quantised_as_by_numpy(seed: int, spread: float, bound: float | None, narrow: bool) -> None:
    x = draw(seed, 24, INPUTS, spread=spread)
    x[3], x[4, 5:], x[5] = 0, 0, 1e-30
    operand = jnp.asarray(x, jnp.bfloat16 if narrow else jnp.float32)
    values, scale = jax.jit(quantize_rows, static_argnums=(1, 2))(operand, 1, bound)
    expected_values, expected_scale = fp8_numpy.quantize(np.asarray(operand), bound)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), expected_values.view(np.uint8))


@pytest.mark.parametrize("rows", [1, 16, 70])
@pytest.mark.parametrize("bound", [None, 2.0])
def test_products_are_those_of_numpy_up_to_rounding(rows: int, bound: float | None) -> None:
    weight, _ = make_weight(0, OUTPUTS, upper_bound=bound)
    x = draw(1, rows, INPUTS)
    x[0, 0] = 9.0
    y = jax.jit(lambda x, weight: weight.product(x, 1, no_pmax))(x, weight)
    values = np.asarray(weight.values).view(fp8_numpy.E4M3)
    expected = fp8_numpy.product(x, values, np.asarray(weight.scale), bound)
    assert y.dtype == jnp.float32
    assert (np.abs(y - expected) <= fp8_numpy.rounding(x, values, np.asarray(weight.scale))).all()
    is_bounded = (fp8_numpy.product(x, values, np.asarray(weight.scale)) != expected).any()
    assert is_bounded == (bound is not None)


@pytest.mark.parametrize("bound", [None, 2.0])
def test_infinity_counts_as_the_bound_and_nan_stays(bound: float | None) -> None:
    weight, _ = make_weight(0, OUTPUTS, upper_bound=bound)
    x = draw(1, 3, INPUTS)
    x[0, 5], x[1, 5] = np.inf, np.nan
    wide = PartlyQuantized(from_e4m3_bits(weight.values, jnp.float32), weight.scale, bound)
    for product in (weight.product, wide.product):
        infinite, nan, finite = np.asarray(product(jnp.asarray(x), 1, no_pmax))
        assert np.isnan(nan).all()
        assert np.isfinite(finite).all()
        assert np.isnan(infinite).all() if bound is None else np.isfinite(infinite).all()
    if bound is not None:
        x[0, 5] = bound
        np.testing.assert_array_equal(infinite, wide.product(jnp.asarray(x), 1, no_pmax)[0])


def test_axes_of_heads_are_rows_and_inputs() -> None:
    """As those of wq (outputs are heads) and wo (inputs are heads)."""
    weight, _ = make_weight(0, 5, 8)
    x = draw(1, 12, INPUTS)
    flat = RowQuantized(weight.values.reshape(40, INPUTS), weight.scale.reshape(40))
    expected = flat.product(x, 1, no_pmax)
    np.testing.assert_array_equal(weight.product(x.reshape(3, 4, INPUTS), 1, no_pmax), expected.reshape(3, 4, 5, 8))
    by_head = RowQuantized(flat.values.reshape(40, 12, 8), flat.scale)
    np.testing.assert_array_equal(by_head.product(x.reshape(3, 4, 12, 8), 2, no_pmax), expected.reshape(3, 4, 40))


def test_the_error_of_a_product_is_as_stated() -> None:
    """docs/fp8.md: its bound for each product, and 3.75 % of the products' root mean square."""
    weight, original = make_weight(0, OUTPUTS)
    x = draw(1, 200, INPUTS, spread=100.0)
    exact = x.astype(np.float64) @ original.astype(np.float64).T
    error = np.abs(np.asarray(weight.product(x, 1, no_pmax)) - exact)
    assert (error <= fp8_numpy.format_error(x, original) * (1 + 1e-5)).all()
    x, w = np.random.default_rng(0).normal(size=(2, 512, 1024)).astype(np.float32)
    values, scale = quantize_rows(jnp.asarray(w))
    y = RowQuantized(jax.lax.bitcast_convert_type(values, jnp.uint8), scale).product(x, 1, no_pmax)
    relative = np.sqrt(np.mean((y - x @ w.T) ** 2) / np.mean((x @ w.T) ** 2))
    assert relative == pytest.approx(0.0375, rel=0.03)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_wide_floats_give_the_numbers_of_fp8(dtype: Any) -> None:
    """A stack of layers of which some are quantised."""
    weight, original = make_weight(0, OUTPUTS, upper_bound=2.0)
    x = jnp.asarray(draw(1, 20, INPUTS), dtype)
    wide = PartlyQuantized(jax.lax.bitcast_convert_type(weight.values, E4M3).astype(dtype), weight.scale, 2.0)
    expected = weight.product(x, 1, no_pmax)
    np.testing.assert_allclose(wide.product(x, 1, no_pmax), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    plain = PartlyQuantized(jnp.asarray(original, dtype), jnp.zeros_like(weight.scale), 2.0)
    expected = x.astype(jnp.float32) @ plain.values.astype(jnp.float32).T
    np.testing.assert_allclose(plain.product(x, 1, no_pmax), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("devices", [2, 4])
def test_rows_shared_by_devices_are_quantised_by_their_whole_maximum(devices: int) -> None:
    """Also where one device's part is all zeros; without the maximum over devices it would be wrong."""
    weight, _ = make_weight(0, OUTPUTS)
    x = draw(1, 20, INPUTS)
    x[7, : INPUTS // devices] = 0
    mesh = make_mesh(tensor=devices)

    def product(x: jax.Array, values: jax.Array, scale: jax.Array, pmax: Any) -> jax.Array:
        return jax.lax.psum(RowQuantized(values, scale).product(x, 1, pmax), "tensor")

    def on_mesh(pmax: Any) -> Any:
        specs = (P(None, "tensor"), P(None, "tensor"), P())
        body = lambda *args: product(*args, pmax)  # noqa: E731
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))(x, weight.values, weight.scale)

    expected = np.asarray(weight.product(x, 1, no_pmax))
    close = {"rtol": 1e-5, "atol": 1e-6 * np.abs(expected).max()}
    np.testing.assert_allclose(on_mesh(lambda x: jax.lax.pmax(x, "tensor")), expected, **close)
    assert not np.allclose(on_mesh(no_pmax), expected, **close)


def quantized_checkpoint(case: Case, directory: Path, modules: str) -> tuple[Llama, dict, Llama, dict]:
    """Write a quantised checkpoint; the model and its parameters, and those before."""
    case.write(directory)
    plain, params = load_checkpoint(directory)
    quantization = RowwiseFp8.of(plain.config.num_layers, modules, activation_scale_ub=None)
    model = Llama(dataclasses.replace(plain.config, quantization=quantization))
    quantized = quantize_params(params, model.config)
    save_checkpoint(directory, model, quantized)
    return model, quantized, plain, params


@pytest.mark.parametrize(
    ("case", "modules"),
    [
        (Case("llama", kv_heads=2, layers=4), "ffn"),
        (Case("gemma3", tied=True, head_dim=16, own=(("sliding_window", 9), ("sliding_window_pattern", 2))), "ffn"),
        pytest.param(Case("llama", kv_heads=1, rope="llama3"), "all", marks=pytest.mark.slow),
        pytest.param(Case("qwen2", kv_heads=8, tied=True), "all", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_and_greedy_tokens_equal_transformers_with_compressed_tensors(
    case: Case, modules: str, tmp_path: Path
) -> None:
    """Hugging Face computes the same from the same files, in float32, and our error is small beside the format's."""
    model, params, plain, before = quantized_checkpoint(case, tmp_path, modules)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = np.random.default_rng(0).integers(case.vocab_size, size=(2, 32))
    expected = greedy(reference, prompt, 32)
    sequence = np.concatenate([prompt, expected], axis=1)
    ours, theirs = np.asarray(model(params, sequence)), logits(reference, sequence)
    difference, of_format = np.abs(ours - theirs), np.abs(np.asarray(plain(before, sequence)) - ours)
    # A sum in another order carries an activation over to the next e4m3 value now and then, and later tokens see it.
    assert np.median(difference) < 1e-5
    assert np.mean(difference > 1e-4) < 0.1
    assert difference.max() < 0.2 * of_format.max()
    np.testing.assert_array_equal(ours[:, 31:-1].argmax(-1), expected)
