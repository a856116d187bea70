"""The forward pass of Llama, Mistral, Qwen2.5, Qwen3 and Gemma 3.

A caller may pass `attend(cache, layer, q, k, v) -> (out, cache)`, which decides what the queries of a layer attend to
and where its keys and values are stored. So the same forward pass runs dense, in a ring over devices, or over a paged
cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float, Int

from longctx.annotations import Real
from longctx.kernels.arrays import check_ids, check_int32
from longctx.kernels.bits import widen
from longctx.models.attend import Attend, Cache, dense_attend
from longctx.models.config import LlamaConfig
from longctx.models.layer_runs import sliding_places
from longctx.models.layer_stacks import in_order, stacking_of
from longctx.models.params import Params, abstract_params, init_params
from longctx.models.projections import OutputMajor, add_bias, project, project_together
from longctx.models.rope import Rope, apply_rope, rope_cos_sin, rope_table
from longctx.models.rope_config import RopeConfig

LayerFunction = Callable[
    [Params, Int[Array, ""], Float[Array, "*B T D"], Cache, Bool[Array, ""] | None],
    tuple[Float[Array, "*B T D"], Cache],
]
"""`(weights, index, x, cache, is_sliding) -> (x, cache)`, one layer of `Llama.run_layers`."""


@dataclass(frozen=True)
class Llama:
    """The functions of a model, for one configuration. It holds no arrays and is hashable.

    Attributes:
      config: the sizes of the model.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.models import Llama, LlamaConfig
      >>> sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2}
      >>> config = LlamaConfig(**sizes, num_heads=4, num_kv_heads=2, head_dim=16)
      >>> model = Llama(config)
      >>> params = model.init(jax.random.key(0))
      >>> tokens = jnp.array([[1, 2, 3, 7, 8]])
      >>> model(params, tokens).shape  # logits
      (1, 5, 256)
      >>> segments, positions = jnp.array([[0, 0, 0, 1, 1]]), jnp.array([[0, 1, 2, 0, 1]])  # two packed sequences
      >>> packed = model(params, tokens, positions, segments)
      >>> bool(jnp.allclose(packed[:, 3:], model(params, tokens[:, 3:]), atol=1e-5))
      True
    """

    config: LlamaConfig

    def init(
        self, key: Array, dtype: DTypeLike = jnp.float32, initializer_range: Real = 0.02, apart: bool = False
    ) -> Params:
        """Random parameters, normal weights, norms of 1 and biases of 0.

        Args:
          key: of `jax.random.key`.
          dtype: of the parameters.
          initializer_range: the standard deviation.
          apart: whether each layer has arrays of its own, see `load_checkpoint`. The weights are the same.

        Returns:
          A pytree of arrays, in which the layers are stacked, unless they are apart.
        """
        return init_params(self.config, key, dtype, initializer_range, apart)

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
          params: the pytree of `init` or `load_checkpoint`.
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
        positions = check_positions(self.config, tokens, positions)
        if attend is None:
            segment_ids = None if segment_ids is None else like_tokens("segment_ids", tokens, segment_ids, are_ids=True)
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
        """Compute the hidden states after the final norm, and the cache.

        Serving calls this under jit, so `tokens` and `positions` are not checked. The cache is a carry of the scan over
        layers, because scanned-over inputs and outputs would be copied whole.

        Args:
          params: of `init` or `load_checkpoint`.
          tokens, positions: integers `[*B, T]`.
          attend: what queries attend to, `attend(cache, layer, q, k, v) -> (out, cache)`.
          cache: any pytree, or None, which only `attend` reads.

        Returns:
          (hidden states `[*B, T, D]` in the parameters' dtype, the cache as `attend` left it).
        """
        x = self.scale_embeddings(_rows_of(params["embed"], tokens))
        sliding = self.sliding(stacking_of(params["layers"]).stages)
        sliding = None if sliding is None else sliding.reshape(-1)
        x, cache = self.run_layers(params["layers"], x, self.rope(positions), attend, cache, sliding=sliding)
        return self.norm(params, x), cache

    def run_layers(
        self,
        layers: Params,
        x: Float[Array, "*B T D"],
        rope: Rope,
        attend: Attend,
        cache: Cache,
        psum: Callable[[Array], Array] = lambda x: x,
        pmax: Callable[[Array], Array] = lambda x: x,
        gather: Callable[[Array], Array] = lambda x: x,
        run_layer: LayerFunction | None = None,
        sliding: Bool[ArrayLike, " layers"] | None = None,
    ) -> tuple[Float[Array, "*B T D"], Cache]:
        """Run hidden states through some consecutive layers, all or part of `params["layers"]`.

        Stacked layers are scanned. A layer that is apart is called by itself, with a constant index: its weights are
        whole arrays, which XLA need not copy. All that are alike have one traced function.

        Args:
          layers: their parameters, stacked or apart (`LayerRuns`).
          x: hidden states `[*B, T, D]`, floating point.
          rope: what `rope` returned for the rows' positions, `[*B, T, H / 2]`.
          attend: as for `forward`; it counts these layers from 0.
          cache: as for `forward`.
          psum, pmax, gather: as for `layer`.
          run_layer: what runs a layer, `(weights, index, x, cache, is_sliding) -> (x, cache)`, such as `layer` with
            remat. None: `layer` itself.
          sliding: which of these layers have the sliding window, bool, a row of `sliding`; may be traced. None: the
            model has no window.

        Returns:
          (hidden states `[*B, T, D]`, the cache).

        Raises:
          ValueError: the model has a window, and `sliding` is None.
        """

        def plain(
            weights: Params, index: Array, x: Array, cache: Cache, is_sliding: Array | None
        ) -> tuple[Array, Cache]:
            return self.layer(weights, index, x, rope, attend, cache, psum, pmax, gather, is_sliding)

        def layer(carry: tuple[Array, Cache], scanned: tuple[Array, Params, Array | None]) -> Any:
            x, cache = carry
            index, weights, is_sliding = scanned
            return (run_layer or plain)(weights, index, x, cache, is_sliding), None

        if self.config.sliding_window is not None and sliding is None:
            raise ValueError("`sliding` must say which layers have the sliding window of the model")
        kinds = None if sliding is None else jnp.asarray(sliding)

        one_layer = jax.jit(layer)  # traced and lowered once for all layers that are alike
        carry, first = (x, cache), 0
        for stack in in_order(layers):
            count = stack["attn_norm"].shape[0]
            if count == 1:
                weights = jax.tree.map(lambda x: x.reshape(x.shape[1:]), stack)
                carry, _ = one_layer(carry, (jnp.int32(first), weights, None if kinds is None else kinds[first]))
            else:
                indices = first + jnp.arange(count, dtype=jnp.int32)
                own = None if kinds is None else kinds[first : first + count]
                carry, _ = lax.scan(layer, carry, (indices, stack, own))
            first += count
        return carry

    def layer(
        self,
        params: Params,
        index: Int[Array, ""],
        x: Float[Array, "*B T D"],
        rope: Rope,
        attend: Attend,
        cache: Cache,
        psum: Callable[[Array], Array] = lambda x: x,
        pmax: Callable[[Array], Array] = lambda x: x,
        gather: Callable[[Array], Array] = lambda x: x,
        is_sliding: Bool[Array, ""] | None = None,
    ) -> tuple[Float[Array, "*B T D"], Cache]:
        """Run hidden states through one layer.

        Under tensor parallelism a device has some columns of wq, wk, wv, w_gate and w_up and the corresponding rows of
        wo and w_down; `psum` sums the products with the latter two over the devices. Where these are quantised, `pmax`
        gives each row of their inputs its maximum over the devices.

        Devices that share these weights may have rows of their own, as in sequence parallelism. Then `gather` makes the
        rows of all of the feed-forward's inputs, `attend` returns them with the heads of this device's wo, and `psum`
        gives each device the sums of its rows.

        Args:
          params: the layer's parameters; 16-bit ones may be bits.
          index: int32, what `attend` is told.
          x: hidden states `[*B, T, D]`, floating point.
          rope: what `rope` returned for the rows' positions, `[*B, T, H / 2]`.
          attend, cache: as for `forward`.
          psum, pmax: the sum and the maximum of an array over the devices of tensor parallelism.
          gather: of this device's rows `[*B, T, D]` those of all devices.
          is_sliding: whether the layer has the sliding window. None: the model has none.

        Returns:
          (hidden states `[*B, T, D]`, the cache).
        """
        is_arranged = lambda w: isinstance(w, OutputMajor)  # noqa: E731
        weights = jax.tree.map(lambda w: w if is_arranged(w) else widen(w, x.dtype), params, is_leaf=is_arranged)
        x, cache = self.attention(weights, index, x, rope, attend, cache, psum, pmax, is_sliding)
        return self.feed_forward(weights, x, psum, pmax, gather), cache

    def attention(
        self,
        weights: Params,
        index: Int[Array, ""],
        x: Float[Array, "*B T D"],
        rope: Rope,
        attend: Attend,
        cache: Cache,
        psum: Callable[[Array], Array] = lambda x: x,
        pmax: Callable[[Array], Array] = lambda x: x,
        is_sliding: Bool[Array, ""] | None = None,
    ) -> tuple[Float[Array, "*B T D"], Cache]:
        """The first half of a layer: norm, projections, attention and the sum with x.

        Args:
          weights: the layer's parameters, no bits; the heads are as many as the projections have.
          index, x, rope, attend, cache, psum, pmax, is_sliding: as for `layer`.

        Returns:
          (hidden states `[*B, T, D]`, the cache).

        Raises:
          ValueError: the model has a window, and `is_sliding` is None.
        """
        config = self.config
        own: dict[str, Any] = {}
        if config.sliding_window is not None:
            if is_sliding is None:
                raise ValueError("`is_sliding` must say whether the layer has the sliding window of the model")
            own["is_sliding"] = is_sliding
        if config.attention_sinks:
            own["sinks"] = weights["sinks"]
        normed = self._rms_norm(x, weights["attn_norm"])
        q, k, v = project_together(normed, weights, ("wq", "wk", "wv"), ("bq", "bk", "bv"))
        if config.qk_norm:
            q, k = self._rms_norm(q, weights["q_norm"]), self._rms_norm(k, weights["k_norm"])
        cos, sin = rope.of_layer(is_sliding)
        q = apply_rope(q, self._query_scale * cos, self._query_scale * sin)
        out, cache = attend(cache, index, q, apply_rope(k, cos, sin), v, **own)
        y = psum(project(out, weights["wo"], axes=2, pmax=pmax))
        if config.out_bias:
            y = add_bias(y, weights["bo"]).astype(x.dtype)
        if config.gemma_style:
            y = self._rms_norm(y, weights["attn_post_norm"])
        return x + y, cache

    @property
    def _query_scale(self) -> float:
        """The factor on queries that makes up for the scale of attention, which divides scores by sqrt(H)."""
        config = self.config
        scalar = config.query_pre_attn_scalar
        return 1.0 if scalar is None else math.sqrt(config.head_dim / scalar)

    def feed_forward(
        self,
        weights: Params,
        x: Float[Array, "*B T D"],
        psum: Callable[[Array], Array] = lambda x: x,
        pmax: Callable[[Array], Array] = lambda x: x,
        gather: Callable[[Array], Array] = lambda x: x,
    ) -> Float[Array, "*B T D"]:
        """The second half of a layer: norm, gated feed-forward and the sum with x, each token by itself.

        Args:
          weights: the layer's parameters, no bits.
          x: hidden states `[*B, T, D]`, floating point.
          psum, pmax, gather: as for `layer`.

        Returns:
          Hidden states `[*B, T, D]`.
        """
        normed = gather(self._rms_norm(x, weights["mlp_norm"]))
        gate, up = project_together(normed, weights, ("w_gate", "w_up"))
        if not self.config.gemma_style:
            return x + psum(project(jax.nn.silu(gate) * up, weights["w_down"], pmax=pmax))
        active = jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(gate.dtype)
        y = psum(project(active * up, weights["w_down"], pmax=pmax))
        return x + self._rms_norm(y, weights["mlp_post_norm"])

    def scale_embeddings(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """The hidden states that layers begin with, of rows `[*B, T, D]` of the embedding."""
        return x * jnp.asarray(math.sqrt(self.config.hidden_size), x.dtype) if self.config.gemma_style else x

    def rope(self, positions: Int[Array, "*B T"]) -> Rope:
        """The rotary cosines and sines, float32 `[*B, T, H / 2]`, of integer positions `[*B, T]`, for all layers."""
        config = self.config
        local: tuple[Array, ...] = ()
        if config.local_rope_theta is not None:
            local = rope_cos_sin(rope_table(RopeConfig(config.local_rope_theta), config.head_dim), positions)
        return Rope(*rope_cos_sin(rope_table(config.rope, config.head_dim), positions), *local)

    def sliding(self, stages: int = 1) -> np.ndarray | None:
        """Which layers have the sliding window: bool `[stages, layers of a stage]`; None: the model has no window.

        Args:
          stages: of a pipeline that the layers are stacked for.

        Returns:
          The layers of each stage; a smaller stage has a layer of zeros first, which has no window.
        """
        return None if self.config.sliding_window is None else sliding_places(self.config, stages)

    def norm(self, params: Params, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """Apply the norm after the last layer.

        Args:
          params: of `init` or `load_checkpoint`.
          x: hidden states `[*B, T, D]`, floating point.

        Returns:
          `[*B, T, D]` in the dtype of x.
        """
        return self._rms_norm(x, params["final_norm"])

    def _rms_norm(self, x: Array, weight: Array) -> Array:
        return rms_norm(x, weight, self.config.norm_eps, self.config.gemma_style)

    def logits(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]:
        """The float32 logits of hidden states.

        Args:
          params: of `init` or `load_checkpoint`.
          hidden: what `forward` returned, `[..., D]`, or some rows of it.

        Returns:
          float32 `[..., vocab]`.
        """
        head = params["lm_head"] if "lm_head" in params else params["embed"].T
        return project(hidden, head, dtype=jnp.float32)


# Jitted here, because outside of jit every call would compile its scan again.
@functools.partial(jax.jit, static_argnums=0)
def _dense_logits(model: Llama, params: Params, tokens: Array, positions: Array, segment_ids: Array | None) -> Array:
    attend = dense_attend(model.config, params["embed"].dtype, positions, segment_ids)
    hidden, _ = model.forward(params, tokens, positions, attend, None)
    return model.logits(params, hidden)


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, D], eps: Real, gemma_style: bool = False
) -> Float[Array, "*B D"]:
    """Divide `x` by its root mean square over the last axis, in float32, and multiply by `weight` in `x.dtype`.

    `gemma_style` multiplies by 1 + `weight` in float32.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if gemma_style:
        return (normed * jnp.broadcast_to(1 + weight.astype(jnp.float32), x.shape)).astype(x.dtype)
    return jnp.broadcast_to(weight.astype(x.dtype), x.shape) * normed.astype(x.dtype)


def check_tokens(config: LlamaConfig, tokens: ArrayLike, is_packed: bool = False) -> Array:
    """Convert `tokens`, of several sequences if `is_packed`, to an array; TypeError or ValueError: they are no ids."""
    array = np.asarray(tokens) if not isinstance(tokens, Array) else tokens
    if array.ndim < 1 or array.size == 0:
        raise ValueError(f"`tokens` must be [*B, T] with at least one token, got shape {array.shape}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`tokens` must be integers, got {array.dtype}")
    if array.shape[-1] > config.max_positions and not is_packed:
        raise ValueError(f"`tokens`: {array.shape[-1]} is more than the model's context of {config.max_positions}")
    check_range("tokens", array, config.vocab_size, "the vocabulary")
    return jnp.asarray(array)


def check_positions(config: LlamaConfig, tokens: Array, positions: ArrayLike | None) -> Array:
    """Convert `positions` to an array in the shape of `tokens`, 0 to T-1 if None; TypeError or ValueError as there."""
    if positions is None:
        return lax.broadcasted_iota(jnp.int32, tokens.shape, tokens.ndim - 1)
    array = like_tokens("positions", tokens, positions)
    check_range("positions", array, config.max_positions, "the model's context")
    return jnp.asarray(array)


def like_tokens(name: str, tokens: Array, value: ArrayLike, are_ids: bool = False) -> Any:
    """Convert integers to an int32 array in the shape of `tokens`; `are_ids`: by `check_ids`."""
    array = (check_ids if are_ids else check_int32)(f"`{name}`", value)
    if array.shape != tokens.shape:
        raise ValueError(f"`{name}` {array.shape} and `tokens` {tokens.shape} differ in shape")
    return array


def check_range(name: str, array: Any, limit: int, what: str, least: int = 0) -> None:
    """Raise ValueError for values outside `[least, limit)`, unless the array is traced or not addressable."""
    if isinstance(array, jax.core.Tracer):
        return
    if isinstance(array, Array) and not array.is_fully_addressable:
        return
    values = np.asarray(array)  # inside a trace, JAX's own minimum of a concrete array would be traced
    low, high = int(values.min()), int(values.max())
    if low < least or high >= limit:
        raise ValueError(f"`{name}` from {low} to {high}: outside {what}, which is {least} to {limit - 1}")


def _rows_of(table: Float[Array, "V D"], tokens: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
    """`table[tokens]`; with Explicit axes sharded as the tokens, which JAX does not choose by itself."""
    of_table, of_tokens = (jax.typeof(x).sharding for x in (table, tokens))
    if AxisType.Explicit not in (*of_table.mesh.axis_types, *of_tokens.mesh.axis_types):
        return table[tokens]
    return table.at[tokens].get(out_sharding=P(*of_tokens.spec, *(None,) * (tokens.ndim + 1 - len(of_tokens.spec))))
