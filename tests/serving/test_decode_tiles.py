"""Tiles of the Hopper kernel in the engine's steps: small ones where all rows may be decodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.kernels.mosaic_gpu.adapter import interpreted
from longctx.serving.runner.attention import PagedAttend
from longctx.serving.runner.paged_cache import LayerInputs, PageTables
from longctx.serving.runner.step_inputs import RowInputs, Shape

PAGE_SIZE, NUM_PAGES, HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 8, 2, 64


@pytest.mark.parametrize(("rows", "max_running", "block_q"), [(40, 40, 64), (40, 8, 128)])
def test_rows_that_may_be_decodes_take_small_tiles(rows: int, max_running: int, block_q: int) -> None:
    """All rows together would fill the large one: 40 times 4 heads of a group."""
    shape = Shape.of((0, 0, rows), max_running, PAGE_SIZE, NUM_PAGES, num_top=0)
    _, inputs = RowInputs.empty(shape)
    of_rank = RowInputs(*(jnp.asarray(x[0]) for x in inputs))
    tables = PageTables(jnp.asarray(np.zeros((max_running, 4), np.int32)), None)
    pool = jax.ShapeDtypeStruct((NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_SIZE), jnp.uint16)
    with interpreted():
        made: list[PagedAttend] = []
        layers = LayerInputs(of_rank, tables, shape, HEADS, pool, jnp.bfloat16)
        jax.eval_shape(lambda: made.append(PagedAttend.make(layers)))
    assert made[0].full.unsharded is not None
    assert made[0].full.unsharded.plan.implementation == "mosaic_gpu"
    assert made[0].full.unsharded.plan.data.seen[0].shape[1] == block_q
