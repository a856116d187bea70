"""The dtypes in which floats are summed, and in which XLA multiplies 16-bit ones: on GPUs their own."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from longctx.kernels.device import Device

_FLAGS = {"amx_bf16", "avx512_bf16"}


def operand_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of the operands of products of arrays of `dtype`; sums are float32 or wider.

    It is `dtype` for floats of 16 bits on a GPU, whose tensor cores multiply them, and for bfloat16 on a CPU with AMX
    or AVX512-BF16; else float32 or wider.
    """
    dtype, device = jnp.dtype(dtype), Device.target()
    if dtype.itemsize == 2 and device.is_gpu:
        return dtype
    if dtype == jnp.bfloat16 and device.platform == "cpu" and _cpu_multiplies_bfloat16():
        return dtype
    return wide_dtype(dtype)


def wide_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of sums of arrays of `dtype`: float32 or wider."""
    # NumPy's rule: JAX's may be refused by the user's `jax_numpy_dtype_promotion`.
    return np.promote_types(jnp.dtype(dtype), np.float32)


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and not _FLAGS.isdisjoint(line.split()) for line in lines)
