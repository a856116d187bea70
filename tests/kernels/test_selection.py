"""The choice of an implementation, and the reasons against the others."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from longctx.kernels import attention, explain, paged_attention
from longctx.kernels.mosaic_gpu import adapter, device
from longctx.kernels.mosaic_gpu.device import Device

Q = jax.ShapeDtypeStruct((6, 4, 128), jnp.bfloat16)
PAGES = jax.ShapeDtypeStruct((5, 64, 2, 128), jnp.bfloat16)


def of(x: jax.ShapeDtypeStruct, **changes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(changes.get("shape", x.shape), changes.get("dtype", x.dtype))


def test_without_a_gpu_xla_is_taken() -> None:
    selection = explain(Q, Q)
    assert selection.taken == "xla"
    assert selection.refused["mosaic_gpu"] == "needs an NVIDIA GPU of the Hopper generation (sm_90), got cpu 'cpu'"
    assert str(selection).splitlines()[1] == "xla         taken"


def test_on_hopper_the_kernel_is_taken() -> None:
    with adapter.interpreted():
        assert explain(Q, Q).taken == explain(Q, PAGES, paged=True).taken == "mosaic_gpu"
        assert explain(Q, Q).refused["xla"] == "slower than mosaic_gpu, which supports the case"


@pytest.mark.parametrize(
    ("q", "pages", "reason"),
    [
        (of(Q, dtype=jnp.float32), None, "needs a dtype of bfloat16 or float16, got float32"),
        (of(Q, shape=(6, 4, 96)), None, "needs a head size of 64, 128, 256, got 96"),
        (Q, of(PAGES, shape=(5, 48, 2, 128)), "needs a page size, a multiple of 16, that divides 128 or is a multiple"),
        (Q, of(PAGES, shape=(5, 4, 2, 128)), "a multiple of 16, that divides 128 or is a multiple of it, got 4"),
    ],
)
def test_what_the_kernel_does_not_support(q: Any, pages: Any, reason: str) -> None:
    with adapter.interpreted():
        selection = explain(q, q) if pages is None else explain(q, pages, paged=True)
        assert selection.taken == "xla"
        assert reason in selection.refused["mosaic_gpu"]
        with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' needs .*; 'xla' would serve"):
            call(q, pages)


def call(q: Any, pages: Any, implementation: str = "mosaic_gpu") -> None:
    q = jnp.ones(q.shape, q.dtype)
    if pages is None:
        attention(q, q, q, implementation=implementation)
    else:
        pages, row = jnp.ones(pages.shape, pages.dtype), jnp.zeros(6, int)
        paged_attention(q, pages, pages, row[None], None, row[:1], row, row, implementation=implementation)


@pytest.mark.parametrize("pages", [None, PAGES])
def test_on_another_device_it_is_refused(pages: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU of the Hopper generation \(sm_90\), got cpu"):
        call(Q, pages)


@pytest.mark.parametrize(("version", "taken"), [(12080, "xla"), (12090, "mosaic_gpu"), (13000, "mosaic_gpu")])
def test_a_compiler_that_miscompiles_it_is_refused(version: int, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Device("NVIDIA H100 80GB HBM3", "gpu", True, 132, version)
    monkeypatch.setattr(device.Device, "target", classmethod(lambda cls: here))
    assert explain(Q, Q).taken == taken
    if taken == "xla":
        assert "needs another CUDA than 12.8" in explain(Q, Q).refused["mosaic_gpu"]


def test_explain_refuses() -> None:
    with pytest.raises(ValueError, match=r"k must have a shape as in attention or paged_attention, got \(6, 4, 128\)"):
        explain(Q, Q, paged=True)
    with pytest.raises(ValueError, match="k must have the head size of q, 128, got 64"):
        explain(Q, of(Q, shape=(6, 4, 64)))


@pytest.mark.parametrize("index", [None, jnp.array([[0, 1, 7]])])
@pytest.mark.parametrize("page", [5, -3])
def test_a_page_that_is_not_there_is_named_by_checkify(index: Any, page: int) -> None:
    q, pages, row = jnp.ones((1, 4, 8)), jnp.ones((5, 4, 2, 8)), jnp.zeros(1, int)

    def run(table: jax.Array, length: int) -> jax.Array:
        return paged_attention(q, pages, pages, table, index, jnp.array([length]), row, row)[0]

    checked = jax.jit(checkify.checkify(run), static_argnums=1)
    error, _ = checked(jnp.array([[0, page - 1, 99]]), 4)
    error.throw()  # the entry is not in use
    error, out = checked(jnp.array([[0, page, 99]]), 5)
    assert bool(jnp.isfinite(out).all())
    with pytest.raises(checkify.JaxRuntimeError, match=rf"page_table must hold pages below 5 .* got {page}"):
        error.throw()
