"""Paged attention as compiled for an H100: the cache in place, and nothing of its size made."""

import jax.numpy as jnp
import pytest
from h100 import h100_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from paged_step import arguments, check_in_place, step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "is_fp8"),
    [("bfloat16", True), ("bfloat16", False), ("float32", False)],
)
def test_a_step_of_several_layers_is_in_place(dtype: str, is_fp8: bool) -> None:
    there = NamedSharding(h100_mesh(context=1), P())
    compiled = step.lower(*arguments(jnp.dtype(dtype), there, is_fp8)).compile()
    check_in_place(compiled, jnp.dtype(dtype), is_fp8)
