"""The Llama forward pass.

A model asks one thing of its surroundings: `attend(cache, layer, q, k, v) -> (out, cache)`. It says
what a layer's queries attend to and where its keys and values are kept, so that the same forward
pass runs dense, in a ring over devices, or over a paged cache.
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
"""Any pytree, or None; only `attend` looks inside."""

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

`layer` is a traced int32; `q` `[*B, T, N, H]` and `k`, `v` `[*B, T, K, H]` are the new tokens', with the
rotary embedding applied; `out` is shaped and typed like `q`.
"""


@dataclass(frozen=True)
class Llama:
    """Functions of parameters, for one configuration. Holds no arrays and is hashable."""

    config: LlamaConfig

    def init(self, key: Array, dtype: DTypeLike = jnp.float32, initializer_range: float = 0.02) -> Params:
        """Random parameters of `dtype`: normal of deviation `initializer_range`."""
        return init_params(self.config, key, dtype, initializer_range)

    def abstract_params(self, dtype: DTypeLike = jnp.float32) -> Params:
        """The shapes of the parameters, as `jax.ShapeDtypeStruct`, with nothing allocated."""
        return abstract_params(self.config, dtype)

    def __call__(
        self,
        params: Params,
        tokens: Int[ArrayLike, "*B T"],
        positions: Int[ArrayLike, "*B T"] | None = None,
        segment_ids: Int[ArrayLike, "*B T"] | None = None,
        attend: Attend | None = None,
    ) -> Float[Array, "*B T vocab"]:
        """Logits of every token.

        Args:
          params: as from `init` or `load_checkpoint`.
          tokens: integers `[*B, T]`.
          positions: integers `[*B, T]`; by default 0 to T-1.
          segment_ids: integers `[*B, T]` for packed sequences, negative for padding. Tokens attend
            within their segment only.
          attend: replaces dense causal attention; then the masking is its own affair.

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
        """The hidden states after the final norm, `[*B, T, D]` in the parameters' dtype, and the cache.

        `tokens` and `positions` are integers `[*B, T]` and are not checked: this is what serving calls under
        jit. The parameters may come as `sharded_params.local_params` makes them. The cache goes through the scan over
        layers as carry, because scanned-over inputs and outputs would be copied whole.
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
        """Hidden states `[*B, T, D]` through some consecutive layers, `params["layers"]` or some of them; `attend`
        counts them from 0.

        Under tensor parallelism a device has some columns of wq, wk, wv, w_gate and w_up and the rows of wo and w_down
        that go with them; `psum` sums what these two give over the devices.
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
        """The norm after the last layer."""
        return rms_norm(x, params["final_norm"], self.config.norm_eps)

    def logits(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]:
        """Float32 logits `[..., vocab]` of hidden states `[..., D]`."""
        head = params["lm_head"] if "lm_head" in params else params["embed"].T
        return project(hidden, head, dtype=jnp.float32)


# Compiled even when the caller does not: otherwise every call would compile its scan anew.
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
    """Contracts the last `axes` of `x` with the first of `weight`, summing in float32, and adds `bias`.

    The result is of `dtype`, by default that of `x`.
    """
    if isinstance(weight, OutputMajor):
        y = weight.product(x, axes)
    else:
        # Highest: by default a GPU would multiply float32 in TF32. Products of 16-bit floats are as fast as ever.
        y = jnp.tensordot(
            x.astype(weight.dtype), weight, axes=axes, precision="highest", preferred_element_type=jnp.float32
        )
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    return y.astype(x.dtype if dtype is None else dtype)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, D], eps: float) -> Float[Array, "*B D"]:
    """`x` over its root mean square on the last axis, in float32, times `weight` in `x.dtype`."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return jnp.broadcast_to(weight.astype(x.dtype), x.shape) * normed.astype(x.dtype)


def check_tokens(config: LlamaConfig, tokens: ArrayLike) -> Array:
    """`tokens` as an array, or an error that says what is wrong with them."""
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
    """Rejects values outside `[0, limit)`, if there are values to look at."""
    if isinstance(array, jax.core.Tracer):
        return
    if isinstance(array, Array) and not array.is_fully_addressable:
        return
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= limit:
        raise ValueError(f"`{name}` from {low} to {high}: outside {what}, which is 0 to {limit - 1}")
