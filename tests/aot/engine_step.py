"""The engine's step as compiled for an H100: the cache is updated in place, and nothing of its size is made."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from abstract_step import CONFIG, NUM_PAGES, PAGE_SIZE, SLOTS, abstract_state
from h100 import h100_mesh
from hlo import IN_PLACE, opcodes_of_size
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.models import Llama, LlamaConfig
from longctx.serving import step as programs
from longctx.serving.cache import page_bytes


def check_step(config: LlamaConfig, dtype: Any) -> str:
    layer = NUM_PAGES * PAGE_SIZE * config.num_kv_heads * config.head_dim
    shape = programs.Shape.of(64, SLOTS, PAGE_SIZE, NUM_PAGES, 2)
    packed = jax.ShapeDtypeStruct(programs.Plan.empty(shape)[0].shape, jnp.int32)
    mesh = h100_mesh(context=1)
    params, state, packed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())),
        (Llama(config).abstract_params(dtype), abstract_state(dtype, config=config), packed),
    )
    with jax.set_mesh(mesh):
        compiled = programs.step.lower(Llama(config), params, state, packed, shape).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= NUM_PAGES * page_bytes(config, PAGE_SIZE, dtype)
    assert memory.temp_size_in_bytes < layer * jnp.dtype(dtype).itemsize
    assert opcodes_of_size(compiled.as_text(), layer) <= IN_PLACE
    return compiled.as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_step_copies_no_cache(dtype: object) -> None:
    assert "mosaic_gpu" not in check_step(CONFIG, dtype)  # its head size is 16


def test_the_step_takes_the_kernel_and_copies_no_cache() -> None:
    assert "mosaic_gpu" in check_step(dataclasses.replace(CONFIG, head_dim=128), jnp.bfloat16)
