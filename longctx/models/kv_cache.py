"""The keys and values of one sequence on one device, and attention to them."""

from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.xla import xla_attention_to_entry
from longctx.kernels.bits import bits_dtype, to_bits
from longctx.models.config import LlamaConfig
from longctx.models.llama import Attend


class KVCache(NamedTuple):
    """`[layers, capacity, K, H]` each, 16-bit floats as their bits; a token's slot is its position."""

    k: Array
    v: Array

    @classmethod
    def empty(cls, config: LlamaConfig, capacity: int, dtype: DTypeLike, device: Any = None) -> Self:
        """An empty cache of `dtype` for positions 0 to capacity - 1, on a device or in a sharding."""
        shape = (config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        k, v = (jnp.zeros(shape, bits_dtype(dtype), device=device) for _ in range(2))
        return cls(k, v)


def attend_to_cache(positions: Array) -> Attend:
    """An `attend` for consecutive new tokens at `positions` `[T]`, carrying a `KVCache`.

    Writes their keys and values in place, then attends to everything up to each. The layer is read where it lies:
    sliced out first, XLA would copy it, and on CPU the whole cache with it.
    """

    def attend(cache: KVCache, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
        at = (layer, positions[0], np.int32(0), np.int32(0))
        cache = KVCache(
            lax.dynamic_update_slice(cache.k, to_bits(k)[None], at),
            lax.dynamic_update_slice(cache.v, to_bits(v)[None], at),
        )
        # Slots not yet written are at later positions: the causal mask hides them, and no work is done for them.
        slots = jnp.arange(cache.k.shape[1], dtype=jnp.int32)
        queries, keys = (Tokens(x[None], jnp.zeros_like(x)[None]) for x in (positions, slots))
        out, _ = xla_attention_to_entry(q[None], cache.k, cache.v, layer, queries, keys, q.shape[-1] ** -0.5)
        return out[0].astype(q.dtype), cache

    return attend
