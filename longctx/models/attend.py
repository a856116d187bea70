"""Attention of the layers of a model: the callable that a caller gives, and dense causal attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from longctx.kernels import attention, plan_attention
from longctx.kernels.attention.attention_plan import AttentionPlan
from longctx.kernels.attention.operands import Implementation
from longctx.models.config import LlamaConfig

Cache = Any
"""Any pytree, or None. Only `attend` reads it."""

Attend = Callable[..., tuple[Float[Array, "*B T N H"], Cache]]
"""`attend(cache, layer, q, k, v) -> (out, cache)`.

`layer` is a traced int32. `q` `[*B, T, N, H]` and `k`, `v` `[*B, T, K, H]` are those of the new tokens, with the rotary
embedding applied. `out` has the shape and dtype of `q`. In a model with a `sliding_window` it is called with
`is_sliding=`, a bool `[]` that may be traced: whether the layer has the window. In a model with `attention_sinks` it is
called with `sinks=` `[N]`.
"""


def dense_attend(
    config: LlamaConfig,
    dtype: DTypeLike,
    positions: Int[Array, "*B T"],
    segment_ids: Int[Array, "*B T"] | None = None,
    implementation: Implementation | None = None,
) -> Attend:
    """Make causal attention among the tokens of this call, with no cache, planned once for all layers of a kind.

    In a model with a window it is sliding where a layer is: `q_first` is data, so that one program serves all layers.
    """
    q, k = (
        jax.ShapeDtypeStruct((*positions.shape, heads, config.head_dim), dtype)
        for heads in (config.num_heads, config.num_kv_heads)
    )

    def plan(q_first: Array | None) -> AttentionPlan:
        return plan_attention(
            q, k, positions, positions, segment_ids, segment_ids, implementation=implementation, q_first=q_first
        )

    if config.sliding_window is None:
        full = sliding = plan(None)
    else:
        sliding = plan(first_seen(config.sliding_window, positions))
        full = plan(jnp.zeros_like(positions)) if not all(config.sliding_layers) else sliding

    def attend(
        cache: Cache,
        layer: Array,
        q: Array,
        k: Array,
        v: Array,
        is_sliding: Array | None = None,
        sinks: Array | None = None,
    ) -> Any:
        own = full if full is sliding else jax.tree.map(functools.partial(jnp.where, is_sliding), sliding, full)
        out, _ = attention(q, k, v, sinks=sinks, plan=own)
        return out, cache

    return attend


def first_seen(window: int, positions: Int[Array, "*B T"]) -> Int[Array, "*B T"]:
    """The first position that each query sees in a layer with a window of `window` tokens, itself included."""
    return jnp.maximum(positions - (window - 1), 0)
