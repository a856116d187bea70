"""The programs that read and write pages, compiled for an H100: in place, without an array of the pool's size."""

import jax.numpy as jnp
import numpy as np
import pytest
from h100 import h100_devices
from hlo import IN_PLACE, collectives, opcodes_of_size

from longctx.serving.runner.page_programs import compile_read, compile_write

# Llama-3-8B on one device: 32 layers of 2048 pages of 64 tokens; a chunk of 512 tokens has 8 pages.
LAYERS, PAGES, BUCKET = 32, 2048, 32 * 8
POOL = LAYERS * PAGES, 64, 8, 128


@pytest.mark.parametrize("dtype", [jnp.uint16, jnp.float32])
def test_pages_are_written_in_place(dtype: object) -> None:
    (device,) = h100_devices(1, 1)
    size, rows = int(np.prod(POOL)), BUCKET * 2 * int(np.prod(POOL[1:])) * jnp.dtype(dtype).itemsize
    for heads, temp in ((8, 1 << 20), (2, 2 * rows)):
        compiled = compile_write(device, POOL, dtype, BUCKET, heads, False)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory.alias_size_in_bytes == 2 * size * jnp.dtype(dtype).itemsize
        assert memory.temp_size_in_bytes <= temp
        assert opcodes_of_size(text, size) <= IN_PLACE
        # A row of a scatter is copied by many threads, not in a loop over rows.
        assert " while(" not in text
        assert not collectives(text, 1)


@pytest.mark.parametrize("dtype", [jnp.uint16, jnp.float32])
def test_a_read_is_one_gather(dtype: object) -> None:
    (device,) = h100_devices(1, 1)
    compiled = compile_read(device, POOL, dtype, BUCKET)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.temp_size_in_bytes <= 1 << 20
    assert opcodes_of_size(text, int(np.prod(POOL))) <= {"parameter", "bitcast"}
    assert " while(" not in text
