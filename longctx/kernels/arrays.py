"""Checks arrays of JAX or NumPy, and brings them to the types that are computed with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from longctx.annotations import Nested

_INT32 = np.iinfo(np.int32)


def check_array(name: str, x: ArrayLike, may_be_bool: bool = False) -> Array:
    """A NumPy array as JAX holds it (float64 is float32 unless x64 is on), a JAX array as it is.

    Raises:
      TypeError: x is neither, or holds no numbers.
    """
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a jax.Array or numpy.ndarray, got {type(x).__name__}")
    if not jnp.issubdtype(x.dtype, jnp.number) and not (may_be_bool and x.dtype == bool):
        raise TypeError(f"{name} must hold numbers, got {x.dtype}")
    return jnp.asarray(x)


def check_floating(name: str, dtype: DTypeLike) -> None:
    """Check that a dtype is one of floating-point numbers; TypeError with the name if it isn't."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {jnp.dtype(dtype)}")


def check_constant(implementation: str, **dims: Any) -> None:
    """Check that dimensions which loops and blocks follow from are no symbols of `jax.export`.

    Raises:
      NotImplementedError: one is; the message names it and what to do.
    """
    for name, dim in dims.items():
        if not isinstance(dim, int):
            raise NotImplementedError(
                f'{name} must be a constant for implementation="{implementation}", got the symbol {dim}: export a '
                'program for each length, or take "reference"'
            )


def check_int32(name: str, x: ArrayLike | Nested) -> Any:
    """Convert integers to int32, those of NumPy on the host. Traced ones saturate: their order to int32 stays.

    Raises:
      TypeError: x is not of integers.
      ValueError: a value is outside the range of int32; those of a traced array are not known.
    """
    values = _check_integers(name, x)
    if _is_unknown(values):
        values = values.clip(max(_INT32.min, int(jnp.iinfo(values.dtype).min)), _INT32.max)
    return values.astype(np.int32)


def check_ids(name: str, x: ArrayLike | Nested) -> Any:
    """`check_int32` for integers that are compared with each other: traced int64 stay what they are.

    Raises:
      TypeError: x is not of integers, or is traced and of a type that neither int32 nor int64 holds.
      ValueError: a value is outside the range of int32; those of a traced array are not known.
    """
    values = _check_integers(name, x)
    if not _is_unknown(values):
        return values.astype(np.int32)
    if not jnp.can_cast(values.dtype, jnp.int64) or jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        raise TypeError(
            f"{name} must be int32 or int64 where it is traced, got {values.dtype}, whose values are not known and "
            f'might not fit: convert it, x.astype("int32"), if they do'
        )
    return values.astype(np.int64)


def _is_unknown(x: Any) -> bool:
    """Whether x may hold values outside the range of int32 that can't be looked at."""
    return isinstance(x, jax.core.Tracer) and x.dtype.itemsize >= 4 and x.dtype != jnp.int32


def _check_integers(name: str, x: ArrayLike | Nested) -> Any:
    values: Any = x if isinstance(x, jax.Array) else np.asarray(x)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    is_wide = values.dtype.itemsize >= 4 and values.dtype != jnp.int32
    if values.size and is_wide and not isinstance(values, jax.core.Tracer):
        with jax.ensure_compile_time_eval():  # the values are known, even where another program is traced
            low, high = int(values.min()), int(values.max())
        if low < _INT32.min or high > _INT32.max:
            raise ValueError(f"{name} must fit into int32, got values from {low} to {high}")
    return values
