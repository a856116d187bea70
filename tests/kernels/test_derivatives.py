"""Derivatives of second order and in forward mode: which there are, and errors that say what to take instead."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.kernels import attention, paged_attention

Q, K, V = (jax.random.normal(jax.random.key(heads), (7, heads, 8)) for heads in (4, 2, 1))
V = jnp.concatenate([V, -V], 1)


def loss(q: Any, implementation: str = "xla") -> Any:
    out, lse = attention(q, K, V, implementation=implementation)
    return jnp.sum(out**2) + jnp.sum(jnp.sin(lse))


def paged_loss(q: Any, implementation: str = "xla") -> Any:
    pages = K[:6].reshape(3, 2, 2, 8), V[:6].reshape(3, 2, 2, 8)
    metadata = jnp.array([[2, 0, 1]]), None, jnp.array([6]), jnp.arange(7), jnp.zeros(7, int)
    out, lse = paged_attention(q, *pages, *metadata, implementation=implementation)
    return jnp.sum(out**2) + jnp.sum(jnp.sin(lse))


@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.slow), True])
def test_forward_over_reverse(jit: bool) -> None:
    """Products with the Hessian, and all of it, which takes a batch of them."""

    def product(q: Any, d_q: Any, implementation: str) -> Any:
        return jax.jvp(jax.grad(lambda q: loss(q, implementation)), (q,), (d_q,))[1]

    product = jax.jit(product, static_argnums=2) if jit else product
    want = product(Q, K[:, :1] + Q, "reference")
    np.testing.assert_allclose(product(Q, K[:, :1] + Q, "xla"), want, atol=1e-5 * np.abs(want).max())
    if jit:
        hessian = jax.jit(jax.hessian(loss), static_argnums=1)
        np.testing.assert_allclose(hessian(Q, "xla"), hessian(Q, "reference"), atol=1e-5 * np.abs(want).max())


def test_reverse_over_reverse_is_refused() -> None:
    def second(q: Any, implementation: str) -> Any:
        return jax.grad(lambda q: jnp.sum(jax.grad(loss)(q, implementation) ** 2))(q)

    with pytest.raises(NotImplementedError, match=r"gradients of attention .* take jax.jvp\(jax.grad\(f\), ...\)"):
        second(Q, "xla")


def test_forward_mode_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r'for jax.jvp of attention itself there is "reference"'):
        jax.jvp(loss, (Q,), (Q,))
    with pytest.raises(NotImplementedError, match='implementation="xla" is differentiable in reverse mode alone'):
        jax.jit(jax.jacfwd(loss))(Q)
    _, change = jax.jvp(lambda q: loss(q, "reference"), (Q,), (Q,))
    assert float(change) == pytest.approx(float(jnp.vdot(jax.grad(loss)(Q), Q)), rel=1e-5)


def test_pages_have_reverse_mode_alone() -> None:
    want = jax.grad(paged_loss)(Q, "reference")
    for gradient in (jax.grad(paged_loss), jax.jit(jax.grad(paged_loss))):
        np.testing.assert_allclose(gradient(Q), want, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r'for jax.jvp of paged_attention itself there is "reference"'):
        jax.jvp(paged_loss, (Q,), (Q,))
    _, change = jax.jvp(lambda q: paged_loss(q, "reference"), (Q,), (Q,))
    assert float(change) == pytest.approx(float(jnp.vdot(want, Q)), rel=1e-5)
