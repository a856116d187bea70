"""The compiled step updates its state in place: nothing the size of a layer of the cache is copied or converted."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_step import (
    CONFIG,
    LAYER,
    NUM_PAGES,
    PAGE_SIZE,
    SLOTS,
    abstract_state,
    compile_sampling,
    compile_step,
    make_shape,
)
from hlo import IN_PLACE, collectives, opcodes_of_size

from longctx.models.footprint import cache_bytes
from longctx.parallel import make_mesh
from longctx.serving import SamplingParams
from longctx.serving.request.sampling_params import SamplingLevel
from longctx.serving.runner import state_updates
from longctx.serving.runner.sampler import LogitBias
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs

pytestmark = pytest.mark.usefixtures("users_fusions")
VOCAB_SIZE = 5_024  # no other array is as wide


def pool_bytes(dtype: Any) -> int:
    return cache_bytes(CONFIG, NUM_PAGES * PAGE_SIZE, dtype_bytes=np.dtype(dtype).itemsize)


@functools.cache
def compiled_step(dtype: object, layered: bool, num_layers: int = CONFIG.num_layers) -> Any:
    mesh, config = make_mesh(), dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE, num_layers=num_layers)
    return compile_step(mesh, make_shape(mesh), dtype, config, layered=layered)


@pytest.mark.parametrize(
    ("dtype", "layered"), [(jnp.float32, True), pytest.param(jnp.bfloat16, False, marks=pytest.mark.slow)]
)
def test_the_step_updates_the_cache_in_place(dtype: object, layered: bool) -> None:
    compiled = compiled_step(dtype, layered)
    programs = compiled if layered else (compiled,)
    with_table, with_cache = (compiled.begin, compiled.layer) if layered else (compiled, compiled)
    table_bytes = SLOTS * CONFIG.max_positions // PAGE_SIZE * 4
    assert with_cache.memory_analysis().alias_size_in_bytes >= pool_bytes(dtype) + (0 if layered else table_bytes)
    assert with_table.memory_analysis().alias_size_in_bytes >= table_bytes
    for program in programs:
        assert program.memory_analysis().temp_size_in_bytes < LAYER * jnp.dtype(dtype).itemsize / 4
        assert opcodes_of_size(program.as_text(), LAYER) <= IN_PLACE
        assert not collectives(program.as_text(), 1)  # one device needs none


@pytest.mark.slow
def test_a_step_of_one_row_that_reads_one_page_updates_the_cache_in_place() -> None:
    mesh, config = make_mesh(), dataclasses.replace(CONFIG, max_positions=PAGE_SIZE)
    layer = compile_step(mesh, make_shape(mesh, (0, 0, 1)), jnp.float32, config, layered=True).layer
    assert layer.memory_analysis().temp_size_in_bytes < LAYER
    assert opcodes_of_size(layer.as_text(), LAYER) <= IN_PLACE


@pytest.mark.parametrize(
    ("exchange", "message", "rounds", "window_pages"),
    [
        ("pass_kv", 2, 8, 0),
        ("pass_q", 0, 1, NUM_PAGES),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("pass_q", 0, 1, 0),
                ("all_gather", 2, 8, 0),
                ("pass_kv", 2, 8, NUM_PAGES),
                ("all_gather", 2, 8, NUM_PAGES),
            )
        ),
    ],
)
def test_every_exchange_updates_the_cache_in_place(exchange: str, message: int, rounds: int, window_pages: int) -> None:
    """Rows of all kinds, of which the sharded ones read pages that others have; of layers of one kind, and of two."""
    mesh, config = make_mesh(context=2), CONFIG
    if window_pages:
        config = dataclasses.replace(CONFIG, sliding_window=100, sliding_layers=(True, False, True))
    options = {"exchange": exchange, "message": message, "rounds": rounds, "num_window_pages": window_pages}
    layer = compile_step(mesh, make_shape(mesh, (16, 8, 8), **options), jnp.float32, config, layered=True).layer
    assert layer.memory_analysis().alias_size_in_bytes >= pool_bytes(jnp.float32)
    assert layer.memory_analysis().temp_size_in_bytes < LAYER * 4 / 4
    assert opcodes_of_size(layer.as_text(), LAYER) <= IN_PLACE


@pytest.mark.parametrize(
    ("dtype", "layered"), [(jnp.float32, True), pytest.param(jnp.bfloat16, False, marks=pytest.mark.slow)]
)
def test_the_programs_of_a_deeper_model_are_no_larger(dtype: object, layered: bool) -> None:
    sizes = []
    for num_layers in (CONFIG.num_layers, 64):
        made = compiled_step(dtype, layered, num_layers)
        # Their instructions: what the text says of places in the source varies.
        sizes.append([program.as_text().count(" = ") for program in (made if layered else (made,))])
    np.testing.assert_allclose(*sizes, rtol=0.02)


@pytest.mark.parametrize(
    "level",
    [pytest.param(x, marks=() if x is SamplingLevel.FILTERS else pytest.mark.slow) for x in SamplingLevel],
    ids=lambda level: level.name,
)
def test_sampling_counts_tokens_in_place(level: SamplingLevel) -> None:
    """Of as many counts as there are slots times tokens, each program changes one for each token that it samples."""
    mesh, config = make_mesh(), dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE)
    counts = f"u32[{SLOTS},{VOCAB_SIZE}]"
    for program in compile_sampling(mesh, make_shape(mesh, (0, 0, 4)), jnp.float32, config, [level]).values():
        opcodes = set(re.findall(rf"= {re.escape(counts)}\S* ([a-z\-]+)\(", program.as_text()))
        assert "scatter" in opcodes
        assert opcodes <= IN_PLACE
        assert program.memory_analysis().alias_size_in_bytes >= SLOTS * VOCAB_SIZE * 4
        assert not re.search(r" (sort|conditional)\(", program.as_text())


def test_state_updates_copy_no_cache() -> None:
    mesh, dtype = make_mesh(), jnp.bfloat16
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    pages, seen = jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((CONFIG.vocab_size,), jnp.uint32)
    bias = LogitBias.row(SamplingParams(logit_bias=((1, 2.0),)))
    state = abstract_state(mesh, dtype)
    for update, *arguments in (
        (state_updates.set_entries, scalar, jax.ShapeDtypeStruct((1,), jnp.int32), pages, pages),
        (state_updates.set_seen, scalar, seen),
        (state_updates.set_bias, scalar, bias),
    ):
        compiled = state_updates.update_program(update, mesh, False, False).lower(state, *arguments).compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= pool_bytes(dtype)
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
        assert opcodes_of_size(compiled.as_text(), LAYER) <= IN_PLACE


def test_bytes_sent_in_a_step_depend_on_its_rows_only() -> None:
    shapes = [make_shape(make_mesh(), (0, 0, 64), num_pages) for num_pages in (16, 1 << 24)]
    sizes = {4 * (RowInputs.length(shape) + SampleInputs.length(shape)) for shape in shapes}
    assert len(sizes) == 1
    assert sizes.pop() < 4096
