"""`hold` changes no bit. That it holds is asserted where it is needed: tests/parallel/test_structure.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.kernels.barrier import hold

VALUES = np.array([0.0, -0.0, 1.5, -np.inf, np.inf, np.nan, 1e-45], np.float32)


@pytest.mark.usefixtures("users_fusions")
@pytest.mark.parametrize("until", [0.0, -0.0, np.nan, np.inf, -1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_bits_stay(dtype: type, until: float) -> None:
    x = {"floats": jnp.array(VALUES).astype(dtype), "integers": jnp.arange(-3, 3), "words": jnp.arange(3, dtype="u2")}
    after = (jnp.full((2, 3), until), jnp.zeros((0, 2)), jnp.arange(2))
    held, (got, *_) = jax.jit(hold).lower(x, after).compile()(x, after)
    for name in x:
        assert held[name].dtype == x[name].dtype
        assert np.asarray(held[name]).tobytes() == np.asarray(x[name]).tobytes()
    np.testing.assert_array_equal(got, after[0])


def test_nothing_to_wait_for() -> None:
    held, _ = jax.jit(hold)(jnp.ones(2), (jnp.zeros((0, 2)), jnp.arange(2)))
    np.testing.assert_array_equal(held, 1)
