"""Attention and projections with products of 16-bit floats, as on GPUs and on CPUs with instructions for bfloat16."""

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
from longctx.kernels.device import Device

# CPUs without and with instructions for bfloat16, and a GPU for which there is no kernel of ours: the dtypes that each
# multiplies as they are.
DEVICES = {
    "cpu": ["float32"],
    "fast cpu": ["float32", "bfloat16"],
    "A100": ["float32", "bfloat16", "float16"],
}


@contextlib.contextmanager
def pretend(name: str) -> Iterator[None]:
    """Trace programs as for a device of `DEVICES`; they run on this CPU."""
    jax.clear_caches()
    device = Device("NVIDIA A100-SXM4-80GB", "gpu", False, 108) if name == "A100" else Device("cpu", "cpu", False, 132)
    with (
        patch.object(Device, "target", lambda: device),
        patch.object(operand_dtype, "_cpu_multiplies_bfloat16", lambda: name == "fast cpu"),
    ):
        yield
    jax.clear_caches()


class Fast:
    """Half precision alone: nothing else is computed in another way."""

    implementation = "xla"
    supports_float32 = supports_float64 = False

    def where(self) -> contextlib.AbstractContextManager[None]:
        return pretend("A100")


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


@pytest.mark.parametrize("name", ["cpu", pytest.param("fast cpu", marks=pytest.mark.slow), "A100"])
def test_operands_of_products(name: str) -> None:
    rows = jax.random.normal(jax.random.key(0), (130, 2, 64), jnp.bfloat16)

    def results(x: jax.Array, implementation: str) -> list[jax.Array]:
        """out, and the gradient for queries, keys and values that are the same."""

        def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out, _ = attention(x, x, x, implementation=implementation, out_dtype=jnp.float32)
            return jnp.sum(out * jnp.cos(out)), out

        gradient, out = jax.jit(jax.grad(forward, has_aux=True))(x)
        return [out, gradient.astype(jnp.float32)]

    dense, exact = results(rows, "reference"), results(rows.astype(jnp.float32), "reference")
    with pretend(name):
        text = jax.jit(jax.grad(lambda x: jnp.sum(attention(x, x, x)[0].astype(jnp.float32)))).lower(rows).as_text()
        found = results(rows, "xla")
        multiplied = widen(to_bits(rows), jnp.bfloat16).dtype
        for dtype in ("bfloat16", "float16", "float32"):
            assert operand_dtype.operand_dtype(dtype) == (dtype if dtype in DEVICES[name] else "float32")
    products = re.findall(r"dot_general.*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\) -> tensor<[\dx]*(\w+)>", text)
    kind = "bf16" if "bfloat16" in DEVICES[name] else "f32"
    assert {x for x in products if x[2] == "f32"} == {(kind, kind, "f32")}
    assert sum(x[2] == "f32" for x in products) >= 7  # forward 2, backward 5
    assert multiplied == ("bfloat16" if kind == "bf16" else "float32")
    for got, plain, want in zip(found, dense, exact, strict=True):
        size = max(1.0, float(jnp.abs(want).max()))
        assert jnp.abs(got - want).max() <= 2.5 * jnp.abs(plain - want).max() + 2e-3 * size
