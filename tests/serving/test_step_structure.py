"""The compiled step updates its state in place: nothing the size of a layer of the cache is copied or converted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_step import CONFIG, LAYER, NUM_PAGES, PAGE_SIZE, SLOTS, abstract_params, abstract_state
from hlo import IN_PLACE, opcodes_of_size

from longctx.models import Llama
from longctx.serving import step as programs
from longctx.serving.cache import PagedCache, page_bytes


@pytest.mark.parametrize(("dtype", "unrolled"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_the_step_copies_no_cache(dtype: object, unrolled: bool) -> None:
    shape = programs.Shape.of(16, SLOTS, PAGE_SIZE, NUM_PAGES, 2)
    packed = jax.ShapeDtypeStruct(programs.Plan.empty(shape)[0].shape, jnp.int32)
    arguments = (Llama(CONFIG), abstract_params(dtype, unrolled), abstract_state(dtype), packed, shape)
    compiled = programs.step.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    cache_bytes = NUM_PAGES * page_bytes(CONFIG, PAGE_SIZE, dtype)
    table_bytes = SLOTS * CONFIG.max_positions // PAGE_SIZE * 4
    assert memory.alias_size_in_bytes >= cache_bytes + table_bytes
    assert memory.temp_size_in_bytes < LAYER * jnp.dtype(dtype).itemsize / 4
    assert opcodes_of_size(compiled.as_text(), LAYER) <= IN_PLACE


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_done_now_and_then_copies_no_cache_either(dtype: object) -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    pages, seen = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((CONFIG.vocab_size,), jnp.uint8)
    state = abstract_state(dtype)
    for lowered in (
        programs.copy_page.lower(state, scalar, scalar, NUM_PAGES),
        programs.set_entries.lower(state, scalar, scalar, pages),
        programs.set_seen.lower(state, scalar, seen),
    ):
        compiled = lowered.compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= NUM_PAGES * page_bytes(CONFIG, PAGE_SIZE, dtype)
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
        assert opcodes_of_size(compiled.as_text(), LAYER) <= IN_PLACE


def test_what_is_sent_in_a_step_depends_on_its_rows_alone() -> None:
    sizes = {
        programs.Plan.empty(programs.Shape.of(64, SLOTS, PAGE_SIZE, num_pages, 2))[0].nbytes
        for num_pages in (16, 1 << 24)
    }
    assert len(sizes) == 1
    assert sizes.pop() < 4096


def test_copied_pages_are_equal_in_every_layer() -> None:
    cache = PagedCache(*(jnp.arange(3 * 4 * 2 * 5.0).reshape(12, 2, 1, 5) + i for i in range(2)))
    state = programs.DeviceState(cache, *(jnp.zeros((1, 1), jnp.int32) for _ in range(3)))
    before = [np.array(x).reshape(3, 4, 2, 1, 5) for x in cache]
    after = [np.array(x).reshape(3, 4, 2, 1, 5) for x in programs.copy_page(state, np.int32(1), np.int32(3), 4).cache]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[:, 3], old[:, 1])
        np.testing.assert_array_equal(new[:, :3], old[:, :3])
