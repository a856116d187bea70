"""Attention and projections with products of bfloat16, as on CPUs with instructions for it."""

import contextlib
import re
from collections.abc import Iterator
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from attention_test_base import AttentionTestBase
from paged_attention_test_base import PagedAttentionTestBase
from paged_cases import SHAPES

from longctx.kernels import attention, operand_dtype
from longctx.kernels.bits import to_bits, widen


@contextlib.contextmanager
def fast_bfloat16(is_fast: bool = True) -> Iterator[None]:
    """Pretend that this CPU has, or lacks, instructions for bfloat16."""
    jax.clear_caches()
    with patch.object(operand_dtype, "_cpu_multiplies_bfloat16", lambda: is_fast):
        yield
    jax.clear_caches()


class Fast:
    """Half precision alone: nothing else is computed in another way."""

    implementation = "xla"
    supports_float32 = supports_float64 = False

    def where(self) -> contextlib.AbstractContextManager[None]:
        return fast_bfloat16()


@pytest.mark.slow
class TestAttention(Fast, AttentionTestBase):
    half_shapes = (((), 70, 200, 2, 3, 64), ((2,), 1, 130, 2, 4, 24))
    half_examples = 2


@pytest.mark.slow
class TestPagedAttention(Fast, PagedAttentionTestBase):
    shapes = SHAPES[:1]
    half_shapes = (SHAPES[0], SHAPES[3])
    half_examples = 2


for base in (TestAttention, TestPagedAttention):
    for name in [name for name in dir(base) if name.startswith("test_") and "half_precision_is" not in name]:
        setattr(base, name, None)


@pytest.mark.parametrize("is_fast", [False, True])
def test_operands_of_products(is_fast: bool) -> None:
    q = jnp.ones((8, 2, 64), jnp.bfloat16)
    rows = jax.random.normal(jax.random.key(0), (130, 2, 64), jnp.bfloat16)
    dense, exact = (
        attention(x, x, x, implementation="reference", out_dtype=jnp.float32)[0]
        for x in (rows, rows.astype(jnp.float32))
    )
    with fast_bfloat16(is_fast):
        text = jax.jit(lambda q: attention(q, q, q)).lower(q).as_text()
        out, _ = attention(rows, rows, rows, out_dtype=jnp.float32)
        assert widen(to_bits(q), jnp.bfloat16).dtype == (jnp.bfloat16 if is_fast else jnp.float32)
        for dtype, expected in (("float16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")):
            assert operand_dtype.operand_dtype(dtype) == (expected if is_fast or dtype != "bfloat16" else "float32")
    products = re.findall(r"dot_general.*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\) -> tensor<[\dx]*(\w+)>", text)
    operands = {pair[:2] for pair in products if pair[2] == "f32"}
    assert operands == {("bf16", "bf16") if is_fast else ("f32", "f32")}
    assert jnp.abs(out - exact).max() <= 2.5 * jnp.abs(dense - exact).max() + 2e-3
