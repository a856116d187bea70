"""The Llama forward pass.

A caller may pass `attend(cache, layer, q, k, v) -> (out, cache)`, which decides what the queries of a layer attend to
and where its keys and values are stored. So the same forward pass runs dense, in a ring over devices, or over a paged
cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int

from longctx.kernels import attention
from longctx.kernels.bits import widen
from longctx.models.config import LlamaConfig
from longctx.models.cpu_weights import OutputMajor
from longctx.models.params import Params, abstract_params, init_params
from longctx.models.rope import apply_rope, rope_cos_sin, rope_table

Cache = Any
"""Any pytree, or None. Only `attend` reads it."""

Attend = Callable[
    [
        Cache,
        Int[Array, ""],
        Float[Array, "*B T N H"],
        Float[Array, "*B T K H"],
        Float[Array, "*B T K H"],
    ],
    tuple[Float[Array, "*B T N H"], Cache],
]
"""`attend(cache, layer, q, k, v) -> (out, cache)`.

`layer` is a traced int32. `q` `[*B, T, N, H]` and `k`, `v` `[*B, T, K, H]` are those of the new tokens, with the rotary
embedding applied. `out` has the shape and dtype of `q`.
"""


@dataclass(frozen=True)
class Llama:
    """The functions of a model, for one configuration. It holds no arrays and is hashable."""

    config: LlamaConfig

    def init(self, key: Array, dtype: DTypeLike = jnp.float32, initializer_range: float = 0.02) -> Params:
        """Random parameters of `dtype`, normal with standard deviation `initializer_range`."""
        return init_params(self.config, key, dtype, initializer_range)

    def abstract_params(self, dtype: DTypeLike = jnp.float32) -> Params:
        """The shapes of the parameters as `jax.ShapeDtypeStruct`; no array is allocated."""
        return abstract_params(self.config, dtype)

    def __call__(
        self,
        params: Params,
        tokens: Int[ArrayLike, "*B T"],
        positions: Int[ArrayLike, "*B T"] | None = None,
        segment_ids: Int[ArrayLike, "*B T"] | None = None,
        attend: Attend | None = None,
    ) -> Float[Array, "*B T vocab"]:
        """Compute the logits of every token.

        Args:
          params: parameters of `init` or `load_checkpoint`.
          tokens: integers `[*B, T]`.
          positions: integers `[*B, T]`; by default 0 to T-1.
          segment_ids: integers `[*B, T]` for packed sequences, negative for padding. Tokens attend
            within their segment only.
          attend: replaces dense causal attention, and does its own masking.

        Returns:
          float32 `[*B, T, vocab]`.

        Raises:
          TypeError: `tokens` or `positions` are not integers.
          ValueError: no tokens, a token id or a position out of range (where they are concrete, not
            traced), more tokens than `max_positions`, mismatched shapes, or `segment_ids` beside
            `attend`.
        """
        tokens = check_tokens(self.config, tokens)
        positions = _check_positions(self.config, tokens, positions)
        if attend is None:
            segment_ids = None if segment_ids is None else _like_tokens("segment_ids", tokens, segment_ids)
            return _dense_logits(self, params, tokens, positions, segment_ids)
        if segment_ids is not None:
            raise ValueError("`segment_ids` has no effect when `attend` is given; mask in `attend`")
        hidden, _ = self.forward(params, tokens, positions, attend, None)
        return self.logits(params, hidden)

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "*B T"],
        positions: Int[Array, "*B T"],
        attend: Attend,
        cache: Cache,
    ) -> tuple[Float[Array, "*B T D"], Cache]:
        """Compute the hidden states after the final norm, in the parameters' dtype, and the cache.

        Serving calls this under jit, so `tokens` and `positions` are not checked. The parameters may be those of
        `sharded_params.local_params`. The cache is a carry of the scan over layers, because scanned-over inputs and
        outputs would be copied whole.
        """
        x, cache = self.run_layers(params["layers"], params["embed"][tokens], positions, attend, cache)
        return self.norm(params, x), cache

    def run_layers(
        self,
        layers: Any,
        x: Float[Array, "*B T D"],
        positions: Int[Array, "*B T"],
        attend: Attend,
        cache: Cache,
        psum: Callable[[Array], Array] = lambda x: x,
    ) -> tuple[Float[Array, "*B T D"], Cache]:
        """Run hidden states through some consecutive layers, all or part of `params["layers"]`.

        `attend` counts these layers from 0. Under tensor parallelism a device has some columns of wq, wk, wv, w_gate
        and w_up and the corresponding rows of wo and w_down; `psum` sums the products with the latter two over the
        devices.
        """
        config = self.config
        cos, sin = rope_cos_sin(rope_table(config.rope, config.head_dim), positions)

        def layer(carry: tuple[Array, Cache], scanned: tuple[Array, Params]) -> Any:
            x, cache = carry
            index, bits = scanned
            weights = jax.tree.map(lambda w: widen(w, x.dtype), bits)
            normed = rms_norm(x, weights["attn_norm"], config.norm_eps)
            q = apply_rope(project(normed, weights["wq"], weights.get("bq")), cos, sin)
            k = apply_rope(project(normed, weights["wk"], weights.get("bk")), cos, sin)
            v = project(normed, weights["wv"], weights.get("bv"))
            out, cache = attend(cache, index, q, k, v)
            x = x + psum(project(out, weights["wo"], axes=2))
            normed = rms_norm(x, weights["mlp_norm"], config.norm_eps)
            gated = jax.nn.silu(project(normed, weights["w_gate"])) * project(normed, weights["w_up"])
            x = x + psum(project(gated, weights["w_down"]))
            return (x, cache), None

        if isinstance(layers, tuple):
            carry = (x, cache)
            for index, weights in enumerate(layers):
                carry, _ = layer(carry, (jnp.int32(index), weights))
            return carry
        indices = jnp.arange(layers["attn_norm"].shape[0], dtype=jnp.int32)
        return lax.scan(layer, (x, cache), (indices, layers))[0]

    def norm(self, params: Params, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """Apply the norm after the last layer."""
        return rms_norm(x, params["final_norm"], self.config.norm_eps)

    def logits(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]:
        """The float32 logits of hidden states."""
        head = params["lm_head"] if "lm_head" in params else params["embed"].T
        return project(hidden, head, dtype=jnp.float32)


# Jitted here, because outside of jit every call would compile its scan again.
@functools.partial(jax.jit, static_argnums=0)
def _dense_logits(model: Llama, params: Params, tokens: Array, positions: Array, segment_ids: Array | None) -> Array:
    hidden, _ = model.forward(params, tokens, positions, dense_attend(positions, segment_ids), None)
    return model.logits(params, hidden)


def dense_attend(positions: Int[Array, "*B T"], segment_ids: Int[Array, "*B T"] | None = None) -> Attend:
    """Causal attention among the tokens of this call, with no cache."""

    def attend(cache: Cache, layer: Array, q: Array, k: Array, v: Array) -> Any:
        out, _ = attention(
            q,
            k,
            v,
            q_positions=positions,
            kv_positions=positions,
            q_segment_ids=segment_ids,
            kv_segment_ids=segment_ids,
        )
        return out, cache

    return attend


def project(
    x: Array,
    weight: Array | OutputMajor,
    bias: Array | None = None,
    axes: int = 1,
    dtype: DTypeLike | None = None,
) -> Array:
    """Contract the last `axes` axes of `x` with the first of `weight`, summing in float32, and add `bias`.

    The result has dtype `dtype`, by default that of `x`.
    """
    if isinstance(weight, OutputMajor):
        y = weight.product(x, axes)
    else:
        # By default a GPU would multiply float32 in TF32. "highest" does not slow down products of 16-bit floats.
        y = jnp.tensordot(
            x.astype(weight.dtype), weight, axes=axes, precision="highest", preferred_element_type=jnp.float32
        )
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    return y.astype(x.dtype if dtype is None else dtype)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, D], eps: float) -> Float[Array, "*B D"]:
    """Divide `x` by its root mean square over the last axis, in float32, and multiply by `weight` in `x.dtype`."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return jnp.broadcast_to(weight.astype(x.dtype), x.shape) * normed.astype(x.dtype)


def check_tokens(config: LlamaConfig, tokens: ArrayLike) -> Array:
    """Convert `tokens` to an array.

    Raises:
      TypeError, ValueError: they are no token ids; the message says why.
    """
    array = np.asarray(tokens) if not isinstance(tokens, Array) else tokens
    if array.ndim < 1 or array.shape[-1] == 0:
        raise ValueError(f"`tokens` must be [*B, T] with at least one token, got shape {array.shape}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`tokens` must be integers, got {array.dtype}")
    if array.shape[-1] > config.max_positions:
        raise ValueError(f"`tokens`: {array.shape[-1]} is more than the model's context of {config.max_positions}")
    _check_range("tokens", array, config.vocab_size, "the vocabulary")
    return jnp.asarray(array)


def _check_positions(config: LlamaConfig, tokens: Array, positions: ArrayLike | None) -> Array:
    if positions is None:
        return jnp.broadcast_to(_counting(tokens), tokens.shape)
    array = _like_tokens("positions", tokens, positions)
    _check_range("positions", array, config.max_positions, "the model's context")
    return jnp.asarray(array)


def _counting(tokens: Array) -> Array:
    return jnp.arange(tokens.shape[-1], dtype=jnp.int32).reshape((1,) * (tokens.ndim - 1) + (-1,))


def _like_tokens(name: str, tokens: Array, value: ArrayLike) -> Any:
    array = value if isinstance(value, Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be integers, got {array.dtype}")
    if array.shape != tokens.shape:
        raise ValueError(f"`{name}` {array.shape} and `tokens` {tokens.shape} differ in shape")
    return array


def _check_range(name: str, array: Any, limit: int, what: str) -> None:
    """Raise ValueError for values outside `[0, limit)`, unless the array is traced or not addressable."""
    if isinstance(array, jax.core.Tracer):
        return
    if isinstance(array, Array) and not array.is_fully_addressable:
        return
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= limit:
        raise ValueError(f"`{name}` from {low} to {high}: outside {what}, which is 0 to {limit - 1}")
