"""Checks arrays of JAX or NumPy, and brings them to the types that are computed with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from longctx.annotations import Nested


def check_array(name: str, x: ArrayLike) -> Array:
    """A NumPy array as JAX holds it (float64 is float32 unless x64 is on), a JAX array as it is.

    Raises:
      TypeError: x is neither, or holds no numbers.
    """
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a jax.Array or numpy.ndarray, got {type(x).__name__}")
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise TypeError(f"{name} must hold numbers, got {x.dtype}")
    return jnp.asarray(x)


def check_floating(name: str, dtype: DTypeLike) -> None:
    """Check that a dtype is one of floating-point numbers; TypeError with the name if it isn't."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {jnp.dtype(dtype)}")


def check_int32(name: str, x: ArrayLike | Nested) -> Any:
    """Convert integers to int32, those of NumPy on the host.

    Raises:
      TypeError: x is not of integers.
      ValueError: a value is outside the range of int32; those of a traced array are not known.
    """
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    if x.size and not isinstance(x, jax.core.Tracer) and x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
        with jax.ensure_compile_time_eval():  # the values are known, even where another program is traced
            low, high = int(x.min()), int(x.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{name} must fit into int32, got values from {low} to {high}")
    return x.astype(np.int32)
