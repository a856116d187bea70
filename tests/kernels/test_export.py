"""`jax.export`: programs for any batch, serialised and loaded, and an error where a symbol can't be compiled for."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from longctx.kernels import attention, paged_attention, plan_paged_attention


def exported(f: Any, symbols: str, *shapes: tuple[Any, ...], dtypes: Any = None) -> Any:
    dims = dict(zip(symbols.split(", "), export.symbolic_shape(symbols), strict=True))
    dtypes = dtypes or [jnp.float32] * len(shapes)
    types = [
        jax.ShapeDtypeStruct(tuple(dims.get(dim, dim) for dim in shape), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    program = export.export(jax.jit(f))(*types)
    if importlib.util.find_spec("flatbuffers") is not None:  # JAX serialises with it, and doesn't depend on it
        program = export.deserialize(program.serialize())
    return program


@pytest.mark.parametrize(
    ("implementation", "length", "symbols"),
    [
        ("xla", 300, "b"),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("xla", 20, "b"), ("reference", "t", "b, t"))),
    ],
)
def test_attention_of_any_batch(implementation: str, length: Any, symbols: str) -> None:
    """And its gradients."""

    def run(q: Any, k: Any, v: Any) -> Any:
        (out, lse), vjp = jax.vjp(lambda *x: attention(*x, implementation=implementation), q, k, v)
        return out, lse, vjp((out, lse))

    program = exported(run, symbols, *(("b", length, heads, 8) for heads in (4, 2, 2)))
    for batch, number in ((1, 20), (3, 300)):
        number = length if isinstance(length, int) else number
        q, k, v = (jax.random.normal(jax.random.key(heads), (batch, number, heads, 8)) for heads in (4, 2, 1))
        arrays = q, k, jnp.concatenate([v, v], 2)
        for got, want in zip(jax.tree.leaves(program.call(*arrays)), jax.tree.leaves(run(*arrays)), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5 * max(1, np.abs(want).max()))


def test_pages_of_any_number() -> None:
    """With a plan: the check that is made without one is an effect, which can't be exported."""

    def run(q: Any, k: Any, v: Any, table: Any, lengths: Any, positions: Any, sequence: Any) -> Any:
        metadata = table, None, lengths, positions, sequence
        return paged_attention(q, k, v, *metadata, plan=plan_paged_attention(4, k, *metadata))

    q, pages = jax.random.normal(jax.random.key(0), (6, 4, 8)), jax.random.normal(jax.random.key(1), (9, 3, 2, 8))
    table = np.array([[3, 8], [1, 0], [2, 7]], np.int32)
    arrays = q, pages, -pages, table, np.array([6, 2, 4], np.int32), np.full(6, 5, np.int32), np.arange(6) % 3
    shapes = (6, 4, 8), ("p", 3, 2, 8), ("p", 3, 2, 8), ("b", 2), ("b",), (6,), (6,)
    program = exported(run, "p, b", *shapes, dtypes=[jnp.float32] * 3 + [jnp.int32] * 4)
    arrays = (*arrays[:-1], arrays[-1].astype(np.int32))
    for got, want in zip(program.call(*arrays), run(*arrays), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_symbolic_lengths_are_refused() -> None:
    shapes = [(2, "t", heads, 8) for heads in (4, 2, 2)]
    with pytest.raises(NotImplementedError, match=r'T must be a constant for implementation="xla", got the symbol t'):
        exported(lambda *x: attention(*x, implementation="xla"), "t", *shapes)
    with pytest.raises(NotImplementedError, match=r"S must be a constant"):
        exported(lambda *x: attention(*x, causal=False), "t", (2, 9, 4, 8), *shapes[1:])
    pages = jnp.ones((5, 3, 2, 8))

    def run(table: Any) -> Any:
        return plan_paged_attention(4, pages, table, None, np.zeros(2, int), np.zeros(3, int), np.zeros(3, int)).data

    with pytest.raises(NotImplementedError, match=r"M must be a constant"):
        exported(run, "m", (2, "m"), dtypes=[jnp.int32])
