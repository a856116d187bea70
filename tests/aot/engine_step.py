"""The engine's step as compiled for an H100: the cache is updated in place, and nothing of its size is made."""

import jax
import jax.numpy as jnp
import pytest
from abstract_step import CONFIG, LAYER, NUM_PAGES, PAGE_SIZE, SLOTS, abstract_state
from h100 import h100_mesh
from hlo import IN_PLACE, opcodes_of_size
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.models import Llama
from longctx.serving import step as programs
from longctx.serving.cache import page_bytes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_step_copies_no_cache(dtype: object) -> None:
    shape = programs.Shape.of(64, SLOTS, PAGE_SIZE, NUM_PAGES, 2)
    packed = jax.ShapeDtypeStruct(programs.Plan.empty(shape)[0].shape, jnp.int32)
    there = NamedSharding(h100_mesh(context=1), P())
    params, state, packed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
        (Llama(CONFIG).abstract_params(dtype), abstract_state(dtype), packed),
    )
    compiled = programs.step.lower(Llama(CONFIG), params, state, packed, shape).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= NUM_PAGES * page_bytes(CONFIG, PAGE_SIZE, dtype)
    assert memory.temp_size_in_bytes < LAYER * jnp.dtype(dtype).itemsize
    assert opcodes_of_size(compiled.as_text(), LAYER) <= IN_PLACE
