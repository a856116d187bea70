"""An `attention_fn` for `flax.nnx.MultiHeadAttention` that computes over a mesh."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from longctx.annotations import Real
from longctx.kernels.attention.operands import Implementation, check_types
from longctx.parallel.context_parallel import Method, context_parallel_attention
from longctx.parallel.layout import Layout

_PRECISIONS = (None, "default", "high", "highest", "bfloat16", "tensorfloat32", "float32", "fastest", *lax.Precision)


class MaskTokens(NamedTuple):
    """Mask as int32 positions and segment ids of queries `[Bm, T]` and keys `[Bm, S]`; exact if they say all of it."""

    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    is_exact: Any


def attention_fn(
    mesh: Mesh | AbstractMesh | None = None,
    *,
    method: Method = "auto",
    layout: Layout = "zigzag",
    axis_name: str = "context",
    head_axis: str | None = None,
    batch_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Callable[..., Array]:
    """An `attention_fn` for `nnx.MultiHeadAttention`: exact attention, its tokens sharded over a mesh.

    The function that it returns takes the arguments of `nnx.dot_product_attention`, and honours or refuses each:

    * `query`, `key`, `value`: `[*B, T, N, H]` and `[*B, S, K, H]`, N a multiple of K.
    * `mask`, `is_causal`: every mask that positions and segment ids can say (causal, hiding padding, keeping packed
      sequences apart, a decode's prefix), the same for all heads. It is compared with them: another mask is a
      ValueError where it is concrete, and makes the output NaN where it is traced. A mask is `[T, S]` in memory, so
      for long sequences give `is_causal=True` and no mask.
    * `dtype`, `promote_dtype`: as there.
    * `precision`: None or a `jax.lax.Precision`; products are computed with at least this one.
    * `broadcast_dropout`, `dropout_rng`: of no effect, as there is no dropout.
    * `bias`, `module` (`sow_weights=True`), and `dropout_rate` over 0 unless `deterministic`: NotImplementedError.

    A query that sees no key gets 0, where `nnx.dot_product_attention` gives the mean of all values. In a decode (T = 1)
    keys stay where they are: the ranks attend to their own, and their states are merged (`kvp_attention`).

    Args:
      mesh: a mesh with `axis_name`. None: that of `jax.set_mesh`.
      method: `"pass_kv"`, `"pass_q"`, `"all_gather"`, `"kvp"`, `"ulysses"` or `"auto"`, as of
        `context_parallel_attention`.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`. Queries, keys and values come in order; each call arranges them
        and puts the result back in order. `ContextParallelAttention` takes tokens that are arranged once.
      axis_name: the mesh axis of the tokens.
      head_axis: the mesh axis of the heads. None: `tensor`, if the mesh has it.
      batch_axis: the mesh axis of the batch; None: every rank computes all of it.
      implementation: as in `longctx.kernels.attention`.

    Returns:
      a function for the argument `attention_fn` of `nnx.MultiHeadAttention`; differentiable.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from longctx.nnx import attention_fn
      >>> from longctx.parallel import make_mesh, use_devices
      >>> use_devices(8)
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=4, in_features=16, attention_fn=attention_fn(make_mesh(context=8)), decode=False,
      ...     rngs=nnx.Rngs(0))
      >>> nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, jnp.ones((2, 37, 16))).shape
      (2, 37, 16)
    """

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: Real = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
    ) -> Array:
        """Attention as `nnx.dot_product_attention` computes it, but that a query which sees no key gets 0."""
        _refuse(bias, dropout_rate, deterministic, precision, module)
        if promote_dtype is None:
            target = jnp.result_type(query, key, value) if dtype is None else dtype
            query, key, value = (jnp.asarray(x, target) for x in (query, key, value))
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        check_types(query, key, value)
        length, kv_length = query.shape[-3], key.shape[-3]
        masks: dict[str, Any] = {"causal": is_causal}
        is_exact: Any = True
        if mask is not None:
            tokens, shape = _mask_tokens(mask, query, key, is_causal)
            names = ("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids")
            masks = {name: x.reshape(*shape, x.shape[-1]) for name, x in zip(names, tokens[:4], strict=True)}
            is_exact = tokens.is_exact
        elif is_causal and length != kv_length:  # nnx.dot_product_attention aligns the first query with the first key
            masks |= {"q_positions": np.arange(length), "kv_positions": np.arange(kv_length)}
        decodes = length == 1
        out = context_parallel_attention(
            query,
            key,
            value,
            mesh=mesh,
            method="kvp" if decodes and method == "auto" else method,
            # One query needs no balance, and a cache that stays where it is needs no exchange.
            layout="contiguous" if decodes else layout,
            axis_name=axis_name,
            head_axis=head_axis,
            batch_axis=batch_axis,
            implementation=implementation,
            **masks,
        )
        return out if is_exact is True else jnp.where(is_exact, out, jnp.nan)

    return attend


def _refuse(bias: Any, dropout_rate: Real, deterministic: bool, precision: Any, module: Any) -> None:
    if bias is not None:
        raise NotImplementedError("bias: scores are never stored, so none can be added; give a mask of what is visible")
    if dropout_rate > 0 and not deterministic:
        raise NotImplementedError(
            f"dropout_rate: weights are never stored, so none can be dropped; got {dropout_rate} and "
            "deterministic=False: give nnx.MultiHeadAttention dropout_rate=0, or deterministic=True"
        )
    if module is not None:
        raise NotImplementedError("module: weights are never stored, so none can be sown; give sow_weights=False")
    if precision not in _PRECISIONS:
        raise NotImplementedError(
            f"precision must be None or a jax.lax.Precision, which attention reaches or exceeds, got {precision!r}"
        )


def _mask_tokens(mask: Any, query: Array, key: Array, is_causal: bool) -> tuple[MaskTokens, tuple[int, ...]]:
    """The mask's positions and segments `[Bm, ...]`, and the batch dimensions that these have.

    Raises:
      TypeError: it holds no numbers.
      ValueError: it has a wrong shape, or it is concrete and no positions and segments give it.
    """
    *batch, length, _, _ = query.shape
    kv_length = key.shape[-3]
    numpy: Any = jnp if isinstance(mask, jax.core.Tracer) else np
    if isinstance(mask, jax.Array) and not isinstance(mask, jax.core.Tracer) and not mask.is_fully_addressable:
        numpy = jnp
    mask = numpy.asarray(mask)
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.number)):
        raise TypeError(f"mask must hold booleans, or numbers that are 0 where nothing is seen, got {mask.dtype}")
    mask = mask.astype(bool)
    full = (*batch, query.shape[-2], length, kv_length)
    if mask.ndim > len(full) or any(
        size not in (1, wanted) for size, wanted in zip(mask.shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(f"mask must have a shape that broadcasts to {full}, got {mask.shape}")
    mask = mask.reshape((1,) * (len(full) - mask.ndim) + mask.shape)
    shared = all(size == 1 for size in mask.shape[:-3])
    shape = () if shared else tuple(batch)
    mask = numpy.broadcast_to(mask, (*((1,) * len(batch) if shared else batch), mask.shape[-3], length, kv_length))
    mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
    if is_causal:
        mask = mask & numpy.tril(numpy.ones((length, kv_length), bool))[None, None]
    tokens = tokens_of_mask(mask)
    if numpy is np and not tokens.is_exact:
        raise ValueError(
            "mask must be the same for all heads, and show each query the keys of its segment up to its position: "
            "causal, without padding, of packed sequences and the like; this one shows others"
        )
    return tokens if numpy is jnp else tokens._replace(is_exact=True), shape


def tokens_of_mask(mask: Any) -> MaskTokens:
    """Find positions and segments that give a mask, bool `[Bm, Hm, T, S]`, of which the first head counts.

    A query's segment is the first key that it sees, its position the last one.
    """
    numpy: Any = jnp if isinstance(mask, jax.Array) else np
    one = mask[:, 0]
    batch, _, keys = one.shape
    index = numpy.arange(keys, dtype=numpy.int32)
    # The initial values are those of no keys, and of no queries.
    first = numpy.min(numpy.where(one, index[None, None, :], keys), 2, initial=keys)
    first = numpy.where(first < keys, first, -1)
    last = numpy.max(numpy.where(one, index[None, None, :], -1), 2, initial=-1)
    kv_segments = numpy.max(numpy.where(one, first[:, :, None], -1), 1, initial=-1)
    visible = (first[:, :, None] == kv_segments[:, None, :]) & (first[:, :, None] >= 0)
    visible &= index[None, None, :] <= last[:, :, None]
    is_exact = (visible[:, None] == mask).all()
    return MaskTokens(last, numpy.broadcast_to(index[None, :], (batch, keys)), first, kv_segments, is_exact)
