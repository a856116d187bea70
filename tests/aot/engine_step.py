"""The engine's step compiled for an H100 updates the cache in place, and makes no array of its size.

`paged` checks the same of attention without a kernel, and `mesh_step` of a step with it, in less time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from abstract_step import CONFIG, NUM_PAGES, PAGE_SIZE, compile_step, make_shape
from h100 import h100_mesh
from hlo import IN_PLACE, collectives, opcodes_of_size

from longctx.models import LlamaConfig
from longctx.models.footprint import cache_bytes
from longctx.models.validation import FP8_KV

pytestmark = pytest.mark.slow


def check_step(config: LlamaConfig, dtype: Any, kv_dtype: str | None = None, window_pages: int = 0) -> str:
    width = config.num_kv_heads * config.head_dim
    layer = NUM_PAGES * PAGE_SIZE * width
    mesh = h100_mesh(stage=1, context=1, tensor=1)
    with jax.set_mesh(mesh):  # on one device no `jax.shard_map` gives the kernels their mesh
        shape = make_shape(mesh, (0, 0, 64), num_window_pages=window_pages)
        compiled = compile_step(mesh, shape, dtype, config, kv_dtype=kv_dtype)
    memory, text, itemsize = compiled.memory_analysis(), compiled.as_text(), jnp.dtype(dtype).itemsize
    # As many window pages as pages, so that all layers have as many of them.
    plain = dataclasses.replace(config, sliding_window=None, sliding_layers=())
    cache = cache_bytes(plain, NUM_PAGES * PAGE_SIZE, dtype_bytes=itemsize, kv_dtype=kv_dtype)
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < layer * (itemsize if kv_dtype is None else 1)
    assert opcodes_of_size(text, layer) <= IN_PLACE
    assert not collectives(text, 1)
    return text


def test_the_step_updates_the_cache_in_place() -> None:
    text = check_step(CONFIG, jnp.bfloat16)
    assert 'custom_call_target="mosaic_gpu' not in text  # its head size is 16
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 2 * CONFIG.num_layers


@pytest.mark.parametrize("kv_dtype", [None, FP8_KV])
def test_the_step_with_the_kernel_updates_the_cache_in_place(kv_dtype: str | None) -> None:
    assert 'custom_call_target="mosaic_gpu' in check_step(
        dataclasses.replace(CONFIG, head_dim=128), jnp.bfloat16, kv_dtype
    )


def test_the_step_of_layers_of_both_kinds_updates_the_cache_in_place() -> None:
    """One kernel of attention serves both, in a loop over the layers."""
    slides = {"sliding_window": 512, "sliding_layers": (True, False, True)}
    config = dataclasses.replace(CONFIG, head_dim=128, **slides)
    assert 'custom_call_target="mosaic_gpu' in check_step(config, jnp.bfloat16, window_pages=NUM_PAGES)
