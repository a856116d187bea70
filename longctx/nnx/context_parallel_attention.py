"""`ContextParallelAttention`: grouped-query attention as an NNX module, its tokens sharded over a mesh."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int

from longctx.annotations import Real
from longctx.kernels.arrays import check_array, check_floating, check_ids
from longctx.kernels.attention.operands import Implementation, Window, check_soft_cap, check_window
from longctx.models.llama import rms_norm
from longctx.models.projections import project, project_together
from longctx.models.rope import apply_rope, rope_cos_sin, rope_table
from longctx.models.rope_config import RopeConfig
from longctx.models.validation import check_integer, check_real
from longctx.parallel.context_parallel import Method, context_parallel_attention
from longctx.parallel.layout import Layout
from longctx.parallel.mesh_axes import (
    MeshAxes,
    check_axes,
    check_mesh,
    is_tracing,
    mesh_with_devices,
    place,
    with_auto_axes,
)


class ContextParallelAttention(nnx.Module):
    """Grouped-query self-attention over long sequences, its tokens sharded over a mesh axis.

    Works with Auto and Explicit mesh axes, in and outside of `nnx.jit`, and under `nnx.grad`, `nnx.scan` and
    `nnx.remat`. Lengths need not divide.

    Args:
      hidden_size: D, the size of a token's hidden state.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads, which divide N. None: N.
      head_dim: H. None: D / N.
      rope: the rotary embedding, applied to queries and keys by their positions. None: none.
      use_bias: whether queries, keys and values have biases.
      qk_norm: whether each head's queries and keys get an RMS norm.
      use_sinks: whether each head has a sink, a logit that takes part in the softmax, as in gpt-oss.
      causal: whether a token sees those up to its position only.
      window, logits_soft_cap: as for `longctx.kernels.attention`.
      norm_eps: epsilon of `qk_norm`.
      mesh: a mesh with `axis_name`. None: that of `jax.set_mesh` when the module is called.
      method: `"pass_kv"`, `"pass_q"`, `"all_gather"`, `"kvp"`, `"ulysses"` or `"auto"`, as of
        `context_parallel_attention`.
      layout: the layout into which a call brings queries, keys and values of tokens in order, and the result back, so
        that causal attention is balanced: `"zigzag"` or `"striped"`. `"contiguous"`: they are computed where they
        stand. So a model of many layers has its tokens arranged once, by `shard_sequence`, and gives their positions
        to contiguous layers.
      axis_name: the mesh axis of the tokens.
      head_axis: the mesh axis of the heads. None: `tensor`, if the mesh has it.
      batch_axis: the mesh axis of the batch; None: every rank computes all of it.
      implementation: as in `longctx.kernels.attention`.
      dtype: of the computation. None: that of x.
      param_dtype: of the parameters.
      rngs: of which `params` initialises them, by a truncated normal of variance 1 / (size of the input).

    Attributes:
      wq, wk, wv: `nnx.Param` `[D, N or K, H]`.
      wo: `nnx.Param` `[N, H, D]`.
      bq, bk, bv: `nnx.Param` `[N or K, H]`, or None.
      q_norm, k_norm: `nnx.Param` `[H]`, or None.
      sinks: `nnx.Param` `[N]`, 0 at first, or None.
      cache: `nnx.Cache` variables, once `init_cache` has made them.

    Raises:
      TypeError, ValueError: an argument has a wrong type, or sizes don't fit together; the message names them.

    Source:
      Exchanges: context parallelism paper, 3.5. Decoding: KV parallelism, Mnemosyne, 4.4.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from longctx.models import RopeConfig
      >>> from longctx.nnx import ContextParallelAttention
      >>> from longctx.parallel import make_mesh, use_devices
      >>> use_devices(8)
      >>> layer = ContextParallelAttention(
      ...     16, num_heads=4, num_kv_heads=2, rope=RopeConfig(), mesh=make_mesh(context=4), rngs=nnx.Rngs(0))
      >>> x = jnp.linspace(-1, 1, 9 * 16).reshape(1, 9, 16)
      >>> y = layer(x)
      >>> layer.init_cache(batch_shape=1, max_length=32)
      >>> prefill, token = layer(x[:, :8], decode=True), layer(x[:, 8:], decode=True)
      >>> bool(jnp.allclose(jnp.concatenate([prefill, token], 1), y, atol=1e-6))
      True
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope: RopeConfig | None = None,
        use_bias: bool = False,
        qk_norm: bool = False,
        use_sinks: bool = False,
        causal: bool = True,
        window: Window | None = None,
        logits_soft_cap: Real | None = None,
        norm_eps: Real = 1e-6,
        mesh: Mesh | AbstractMesh | None = None,
        method: Method = "auto",
        layout: Layout = "zigzag",
        axis_name: str = "context",
        head_axis: str | None = None,
        batch_axis: str | None = None,
        implementation: Implementation | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_size = check_integer("hidden_size", hidden_size, 1)
        num_heads = check_integer("num_heads", num_heads, 1)
        num_kv_heads = check_integer("num_kv_heads", num_kv_heads, 1)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"head_dim must be given where num_heads ({num_heads}) doesn't divide {hidden_size}")
        head_dim = hidden_size // num_heads if head_dim is None else check_integer("head_dim", head_dim, 1)
        if not isinstance(rope, RopeConfig | None):
            raise TypeError(f"rope must be a longctx.models.RopeConfig or None, got {type(rope).__name__}")
        if rope is not None and head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {head_dim}")
        norm_eps = check_real("norm_eps", norm_eps, 0)
        if dtype is not None:
            check_floating("dtype", dtype)
        check_floating("param_dtype", param_dtype)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rope, self.causal, self.norm_eps, self.dtype = rope, causal, norm_eps, dtype
        check_window(window)
        self.window, self.logits_soft_cap = window, check_soft_cap(logits_soft_cap)
        self.mesh, self.method, self.layout, self.implementation = mesh, method, layout, implementation
        self.axis_name, self.head_axis, self.batch_axis = axis_name, head_axis, batch_axis

        outward = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2))
        inward = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=2)
        self.wq = self._param(outward(rngs.params(), (hidden_size, num_heads, head_dim), param_dtype), 1)
        self.wk = self._param(outward(rngs.params(), (hidden_size, num_kv_heads, head_dim), param_dtype), 1)
        self.wv = self._param(outward(rngs.params(), (hidden_size, num_kv_heads, head_dim), param_dtype), 1)
        self.wo = self._param(inward(rngs.params(), (num_heads, head_dim, hidden_size), param_dtype), 0)

        def constant(is_wanted: bool, value: Real, *shape: int) -> nnx.Param | None:
            heads = 0 if len(shape) > 1 else None
            return nnx.data(self._param(jnp.full(shape, value, param_dtype), heads) if is_wanted else None)

        self.bq = constant(use_bias, 0, num_heads, head_dim)
        self.bk = constant(use_bias, 0, num_kv_heads, head_dim)
        self.bv = constant(use_bias, 0, num_kv_heads, head_dim)
        self.q_norm = constant(qk_norm, 1, head_dim)
        self.k_norm = constant(qk_norm, 1, head_dim)
        self.sinks = constant(use_sinks, 0, num_heads)
        self.cache: nnx.Dict | None = nnx.data(None)

    def init_cache(self, batch_shape: int | tuple[int, ...], max_length: int, dtype: DTypeLike = jnp.float32) -> None:
        """Make an empty cache, in the place of one that is there. Its slots are sharded over the mesh, evenly.

        Args:
          batch_shape: `*B` of the x to come, or its product.
          max_length: tokens that fit in; up to N - 1 more do, as all ranks have equally many slots.
          dtype: of keys and values.

        Raises:
          TypeError: a size is no integer, or `dtype` is not of floating-point numbers.
          ValueError: no mesh is given or set, the ranks of `batch_axis` don't divide the batch, or `max_length` is not
            positive.
        """
        sizes = batch_shape if isinstance(batch_shape, tuple | list) else (batch_shape,)
        batch = math.prod(check_integer("batch_shape", size, 0) for size in sizes)
        max_length = check_integer("max_length", max_length, 1)
        check_floating("dtype", dtype)
        mesh = check_mesh(mesh_with_devices(self.mesh))
        axes = self._axes(mesh)
        ranks, replicas = axes.size(axes.sequence), axes.size(axes.batch)
        if batch % replicas:
            raise ValueError(f"the {replicas} ranks of batch_axis must divide the batch of {batch}")
        slots = math.ceil(max_length / ranks) * ranks
        heads = (batch, slots, self.num_kv_heads, self.head_dim)

        def full(shape: tuple[int, ...], value: int, dtype: Any, spec: Any) -> Array:
            sharding = None if is_tracing() else NamedSharding(mesh, spec)
            return place(jnp.full(shape, value, dtype, device=sharding), mesh, spec)

        specs = _entry_specs(axes)
        self.cache = nnx.Dict(
            key=nnx.Cache(full(heads, 0, dtype, specs.key)),
            value=nnx.Cache(full(heads, 0, dtype, specs.value)),
            positions=nnx.Cache(full(heads[:2], 0, jnp.int32, specs.positions)),
            segment_ids=nnx.Cache(full(heads[:2], -1, jnp.int32, specs.segments)),
            length=nnx.Cache(jnp.zeros((), jnp.int32)),
            spread=nnx.Cache(jnp.zeros((), jnp.int32)),
        )

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        positions: Int[ArrayLike, "... T"] | None = None,
        segment_ids: Int[ArrayLike, "... T"] | None = None,
        decode: bool = False,
    ) -> Float[Array, "*B T D"]:
        """Attend, each token to those of its segment up to its position.

        With `decode`, the tokens are stored in the cache and attend to all that it has. Each rank stores the tokens
        that it has, where there are as many as ranks; a single token is stored by one rank after the other. No cached
        key is ever moved to be stored, and none to be attended to with `method="kvp"` or `"pass_q"`.

        Args:
          x: hidden states `[*B, T, D]`.
          positions: integers `[T]` or `[*B, T]`; by default 0 to T-1, with `decode` counted on from the cache.
          segment_ids: integers `[T]` or `[*B, T]`, negative for padding; by default 0.
          decode: whether to use the cache.

        Returns:
          `[*B, T, D]`. NaN if `decode` found the cache full and could not raise, because it is traced.

        Raises:
          TypeError: x is not of floating-point numbers, or positions or segments are no integers.
          ValueError: a shape is wrong, there is no cache, or it is full; or as `context_parallel_attention` does.
        """
        x = check_array("x", x)
        check_floating("x", x.dtype)
        if x.ndim < 2 or x.shape[-1] != self.wq.shape[0]:
            raise ValueError(f"x must be [*B, T, {self.wq.shape[0]}], got {x.shape}")
        if decode and self.cache is None:
            raise ValueError("decode: there is no cache, call init_cache first")
        if self.dtype is not None:
            x = x.astype(self.dtype)
        length = x.shape[-2]
        if positions is None:
            first = self.cache["length"][...] if decode and self.cache is not None else 0
            positions = first + jnp.arange(length, dtype=jnp.int32)
        positions = _check("positions", positions, x)
        segments = jnp.zeros(length, jnp.int32) if segment_ids is None else _check("segment_ids", segment_ids, x)

        weights = {name: getattr(self, name) for name in ("wq", "wk", "wv", "bq", "bk", "bv")}
        weights = {name: param[...].astype(x.dtype) for name, param in weights.items() if param is not None}
        q, k, v = project_together(x, weights, ("wq", "wk", "wv"), ("bq", "bk", "bv"))
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm[...], self.norm_eps)
            k = rms_norm(k, self.k_norm[...], self.norm_eps)
        if self.rope is not None:
            cos_sin = rope_cos_sin(rope_table(self.rope, self.head_dim), jnp.broadcast_to(positions, x.shape[:-1]))
            q, k = apply_rope(q, *cos_sin), apply_rope(k, *cos_sin)
        attend = self._attend_cached if decode else self._attend
        out = attend(q, k, v, positions, segments)
        contract: Any = functools.partial(project, axes=2)
        sharding = jax.typeof(out).sharding
        if AxisType.Explicit in sharding.mesh.axis_types:  # a product over sharded heads must say how it is sharded
            contract = jax.sharding.auto_axes(contract, out_sharding=P(*sharding.spec[:-2], None))
        return contract(out, self.wo[...].astype(x.dtype))

    def _attend(self, q: Array, k: Array, v: Array, positions: Array, segments: Array) -> Array:
        return context_parallel_attention(
            q,
            k,
            v,
            q_positions=positions,
            kv_positions=positions,
            q_segment_ids=segments,
            kv_segment_ids=segments,
            layout=self.layout,
            **self._options(),
        )

    def _attend_cached(self, q: Array, k: Array, v: Array, positions: Array, segments: Array) -> Array:
        """Store the new keys, then attend to all of the cache."""
        assert self.cache is not None
        mesh = check_mesh(self.mesh)
        cache = _Entries(*(self.cache[name][...] for name in ("key", "value", "positions", "segment_ids")))
        *batch, num_new, _, _ = q.shape
        count, slots = math.prod(batch), cache.key.shape[1]
        if cache.key.shape[0] != count:
            raise ValueError(f"x must have the batch of the cache, {cache.key.shape[0]}, got {tuple(batch)}")
        length, spread = self.cache["length"][...], self.cache["spread"][...]
        has_room = length + num_new <= slots
        if not isinstance(has_room, jax.core.Tracer) and not has_room:
            raise ValueError(f"the cache has {slots} slots, {int(length)} of them taken: no room for {num_new} more")
        flat_q, flat_k, flat_v = (x.reshape(count, *x.shape[-3:]) for x in (q, k, v))
        rows = [jnp.broadcast_to(x, (*batch, num_new)).reshape(count, num_new) for x in (positions, segments)]
        new = _Entries(flat_k, flat_v, *rows)
        cache, length, spread = _append(mesh, self._axes(mesh), cache, new, length, spread)
        for name, x in zip(("key", "value", "positions", "segment_ids"), cache, strict=True):
            self.cache[name][...] = x
        self.cache["length"][...], self.cache["spread"][...] = length, spread
        out = context_parallel_attention(
            flat_q,
            cache.key.astype(q.dtype),
            cache.value.astype(q.dtype),
            q_positions=rows[0],
            kv_positions=cache.positions,
            q_segment_ids=rows[1],
            kv_segment_ids=cache.segments,
            layout="contiguous",
            **self._options(),
        )
        return jnp.where(has_room, out, jnp.nan).reshape(q.shape)

    def _param(self, x: Array, heads: int | None) -> nnx.Param:
        """A parameter, placed over the mesh of `jax.set_mesh`: its dimension `heads` is sharded if it can be."""
        mesh = mesh_with_devices(None)
        if mesh is None or self.axis_name not in mesh.shape:
            return nnx.Param(x)
        axis = check_axes(mesh, self.axis_name, self.head_axis, self.batch_axis).head
        is_divided = axis is not None and heads is not None and x.shape[heads] % mesh.shape[axis] == 0
        return nnx.Param(place(x, mesh, P(*(None,) * (heads or 0), axis) if is_divided else P()))

    def _options(self) -> dict[str, Any]:
        names = ("mesh", "method", "axis_name", "head_axis", "batch_axis", "causal", "implementation")
        sinks = None if self.sinks is None else self.sinks[...]
        options = {name: getattr(self, name) for name in (*names, "window", "logits_soft_cap")}
        return options | {"sinks": sinks}

    def _axes(self, mesh: Mesh | AbstractMesh) -> MeshAxes:
        """The axes of the cache: its heads are sharded where there are enough of them."""
        axes = check_axes(mesh, self.axis_name, self.head_axis, self.batch_axis)
        return axes if self.num_kv_heads % axes.size(axes.head) == 0 else dataclasses.replace(axes, head=None)


def _check(name: str, given: ArrayLike, x: Array) -> Array:
    array = jnp.asarray(check_ids(name, given))
    if array.shape not in (x.shape[-2:-1], x.shape[:-1]):
        raise ValueError(f"{name} must have the shape {x.shape[-2:-1]} or {x.shape[:-1]}, got {array.shape}")
    return array


class _Entries(NamedTuple):
    """Keys and values `[B, L, K, H]` with int32 positions and segment ids `[B, L]`, or their PartitionSpecs.

    Segment -1 is an empty slot.
    """

    key: Any
    value: Any
    positions: Any
    segments: Any


def _entry_specs(axes: MeshAxes) -> _Entries:
    """The PartitionSpecs of a cache."""
    rows = P(axes.batch, axes.sequence)
    heads = P(axes.batch, axes.sequence, axes.head)
    return _Entries(heads, heads, rows, rows)


def _append(
    mesh: Mesh | AbstractMesh, axes: MeshAxes, cache: _Entries, new: _Entries, length: Array, spread: Array
) -> tuple[_Entries, Array, Array]:
    """Store T new rows: equal parts on the ranks that have them, the rest on one rank after another.

    So nothing moves where rows are many, and all ranks fill evenly. `length` counts the rows of the cache, which must
    have room, and `spread` those that were stored by one rank after another.
    """
    ranks = axes.size(axes.sequence)
    num_new = new.key.shape[1]
    num_rest = num_new % ranks
    num_equal = num_new - num_rest
    specs = _entry_specs(axes)
    rest_specs = _Entries(*(P(spec[0], None, *spec[2:]) for spec in specs))

    def local(cache: _Entries, equal: _Entries, rest: _Entries, length: Array, spread: Array) -> _Entries:
        rank = lax.axis_index(axes.sequence)
        share = (length - spread) // ranks
        filled = share + (spread + ranks - 1 - rank) // ranks
        if num_equal:
            cache = _update(cache, equal, filled + jnp.arange(num_equal // ranks))
        if num_rest:
            turn = spread + jnp.arange(num_rest)
            slots = share + num_equal // ranks + turn // ranks
            cache = _update(cache, rest, jnp.where(turn % ranks == rank, slots, cache.key.shape[1]))
        return cache

    def program(mesh: Any, operands: Any) -> _Entries:
        return jax.shard_map(local, mesh=mesh, in_specs=(specs, specs, rest_specs, P(), P()), out_specs=specs)(
            *operands
        )

    parts = (jax.tree.map(lambda x: x[:, :num_equal], new), jax.tree.map(lambda x: x[:, num_equal:], new))
    cache = with_auto_axes(program, mesh, (cache, *parts, length, spread), specs)
    return cache, length + num_new, spread + num_rest


def _update(cache: _Entries, new: _Entries, slots: Array) -> _Entries:
    """Write rows into slots; those out of range are dropped."""
    return jax.tree.map(lambda x, y: x.at[:, slots].set(y.astype(x.dtype), mode="drop"), cache, new)
