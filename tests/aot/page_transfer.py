"""The programs that read and write pages, compiled for an H100: in place, without an array of the pool's size."""

import numpy as np
import pytest
from h100 import h100_devices
from hlo import IN_PLACE, collectives, opcodes_of_size

from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.runner.page_programs import PoolShape, compile_read, compile_write

# Llama-3-8B on one device: 32 layers of 2048 pages of 64 tokens; a chunk of 512 tokens has 8 pages.
LAYERS, PAGES, BUCKET = 32, 2048, 32 * 8
POOL = LAYERS * PAGES, 64, 8, 128
DTYPES = ["bfloat16", "float32", "float8_e4m3fn"]


def pool_of(dtype: str) -> PoolShape:
    return PoolShape(PageLayout(LAYERS, 8, 128, 64, dtype), LAYERS * PAGES, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_written_in_place(dtype: str) -> None:
    (device,) = h100_devices(1, 1)
    pool = pool_of(dtype)
    size, layout = int(np.prod(POOL)), pool.layout
    row = layout.page_bytes // LAYERS
    for heads, temp in ((8, BUCKET * row if layout.has_scales else 1 << 20), (2, 2 * BUCKET * row)):
        compiled = compile_write(device, pool, BUCKET, heads, False)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory.alias_size_in_bytes == POOL[0] * row
        assert memory.temp_size_in_bytes <= temp
        assert opcodes_of_size(text, size) <= IN_PLACE
        # A row of a scatter is copied by many threads, not in a loop over rows.
        assert " while(" not in text
        assert not collectives(text, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_read_is_one_gather(dtype: str) -> None:
    (device,) = h100_devices(1, 1)
    compiled = compile_read(device, pool_of(dtype), BUCKET)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.temp_size_in_bytes <= 1 << 20
    assert opcodes_of_size(text, int(np.prod(POOL))) <= {"parameter", "bitcast"}
    assert " while(" not in text
