"""The shapes of an engine's state with a cache of some size, to compile a step without anything being there."""

import functools

import jax
import jax.numpy as jnp

from longctx.models import Llama, LlamaConfig
from longctx.serving import step as programs
from longctx.serving.cache import PagedCache

CONFIG = LlamaConfig(64, 32, 48, 3, 4, 2, 16, max_positions=1 << 20)
PAGE_SIZE, NUM_PAGES, SLOTS = 64, 2048, 8
LAYER = NUM_PAGES * PAGE_SIZE * CONFIG.num_kv_heads * CONFIG.head_dim


def abstract_state(dtype: object, num_pages: int = NUM_PAGES, config: LlamaConfig = CONFIG) -> programs.DeviceState:
    entries = config.max_positions // PAGE_SIZE
    return programs.DeviceState(
        jax.eval_shape(functools.partial(PagedCache.empty, config, num_pages, PAGE_SIZE, dtype)),
        jax.ShapeDtypeStruct((SLOTS, entries), jnp.int32),
        jax.ShapeDtypeStruct((SLOTS,), jnp.int32),
        jax.ShapeDtypeStruct((SLOTS, config.vocab_size), jnp.uint8),
    )


def abstract_params(dtype: object, unrolled: bool) -> dict:
    params = Llama(CONFIG).abstract_params(dtype)
    if unrolled:  # as `arrange_for_cpu` makes them
        layer = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in params["layers"].items()}
        params["layers"] = (layer,) * CONFIG.num_layers
    elif dtype == jnp.bfloat16:
        params["layers"] = {n: jax.ShapeDtypeStruct(x.shape, jnp.uint16) for n, x in params["layers"].items()}
    return params
