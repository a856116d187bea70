"""`dot_product_attention`: `attention` with the signature of `jax.nn.dot_product_attention`."""

from typing import Any, Literal, overload

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import ArrayLike, Bool, Float, Int

from longctx.annotations import Real
from longctx.kernels.arrays import check_array, check_floating, check_ids
from longctx.kernels.attention.api import attention
from longctx.kernels.attention.operands import Implementation, Window, check_broadcasts, check_window


@overload
def dot_product_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K Hv"],
    bias: Float[ArrayLike, "... T S"] | None = None,
    mask: Bool[ArrayLike, "... T S"] | None = None,
    *,
    scale: Real | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, "B"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, "B"] | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    return_residual: Literal[False] = False,
) -> Float[Array, "*B T N Hv"]: ...


@overload
def dot_product_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K Hv"],
    bias: Float[ArrayLike, "... T S"] | None = None,
    mask: Bool[ArrayLike, "... T S"] | None = None,
    *,
    scale: Real | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, "B"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, "B"] | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    return_residual: Literal[True],
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...


def dot_product_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K Hv"],
    bias: Float[ArrayLike, "... T S"] | None = None,
    mask: Bool[ArrayLike, "... T S"] | None = None,
    *,
    scale: Real | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, "B"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, "B"] | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Any:
    """Attention with the arguments and results of `jax.nn.dot_product_attention`, so that one import changes a model.

    Results are equal but for rows that see no key: they are 0, where `jax.nn` returns the mean of all values, unless
    `query_seq_lengths` ends before them, and have `lse = -inf`, where `jax.nn` has a large negative number. Causality,
    lengths and the window empty blocks before anything is computed; `bias` or `mask` is read in blocks, and scores are
    never in memory as a whole; both are first joined to one array of the shape that they broadcast to.

    Args:
      query: `[*B, T, N, H]`, floating point, with one batch dimension or none.
      key, value: `[*B, S, K, H]` and `[*B, S, K, Hv]`, N a multiple of K.
      bias: added to scores, floating point; broadcasts to `[*B, N, T, S]`.
      mask: true where a query may see a key; broadcasts to `[*B, N, T, S]`.
      scale: factor on the scores, a Python number, default `H ** -0.5`.
      is_causal: whether query t sees only keys 0 to t.
      query_seq_lengths, key_value_seq_lengths: integers `[B]`: the queries and keys of each sequence, of which others
        are padding.
      local_window_size: tokens before and after a query that it sees, as `window` of `attention`.
      implementation: as for `attention`. The `"cudnn"` of `jax.nn` is none of them.
      return_residual: whether to return lse too.

    Returns:
      out `[*B, T, N, Hv]` in the dtype of query; with `return_residual`, (out, lse `[*B, T, N]` in the dtype of key),
      where lse has no gradient.

    Raises:
      ValueError, TypeError, NotImplementedError: as `attention`; the message names the argument.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx import dot_product_attention
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> q, k, v = (jax.random.normal(key, (2, 6, heads, 16)) for key, heads in zip(keys, (4, 2, 2)))
      >>> bias = jnp.zeros((4, 6, 6)).at[0].set(-1.0)
      >>> ours = dot_product_attention(q, k, v, bias, is_causal=True, local_window_size=(2, 0))
      >>> theirs = jax.nn.dot_product_attention(q, k, v, bias, is_causal=True, local_window_size=(2, 0))
      >>> bool(jnp.allclose(ours, theirs, atol=1e-6))
      True
    """
    query, key, value = (check_array(*x) for x in (("query", query), ("key", key), ("value", value)))
    for name, x in (("query", query), ("key", key)):
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} must have a shape [B, length, heads, H] or [length, heads, H], got {x.shape}")
    batch, length, kv_length = query.shape[:-3], query.shape[-3], key.shape[-3]
    check_window(local_window_size, "local_window_size")
    positions: dict[str, Any] = {}
    if is_causal or local_window_size is not None:
        positions = {"q_positions": jnp.arange(length), "kv_positions": jnp.arange(kv_length)}
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        for side, count, lengths in (("q", length, query_seq_lengths), ("kv", kv_length, key_value_seq_lengths)):
            positions[f"{side}_segment_ids"] = _segments(side, lengths, count, batch)
    out, lse = attention(
        query,
        key,
        value,
        **positions,
        causal=is_causal,
        window=local_window_size,
        bias=_with_mask(bias, mask, (*batch, query.shape[-2], length, kv_length)),
        scale=scale,
        implementation=implementation,
    )
    return (out, lax.stop_gradient(lse).astype(key.dtype)) if return_residual else out


def _segments(side: str, lengths: Any, count: int, batch: tuple[int, ...]) -> Array:
    """Segments `[*B, count]`: 0, and -1 from the length of each sequence on."""
    if lengths is None:
        return jnp.zeros(count, jnp.int32)
    name = "query_seq_lengths" if side == "q" else "key_value_seq_lengths"
    found = jnp.asarray(check_ids(name, lengths))
    wanted = batch or (1,)
    if found.shape != wanted:
        raise ValueError(f"{name} must have the shape {wanted}, a length for each sequence, got {found.shape}")
    return jnp.where(jnp.arange(count)[None] < found[:, None], 0, -1).reshape(*batch, count)


def _with_mask(bias: Any, mask: Any, wanted: tuple[int, ...]) -> Any:
    """The bias, with -inf where the mask is false; the mask itself where there is no bias.

    Both broadcast to the shape `wanted`, `[*B, N, T, S]`; `jax.nn` takes them with a batch dimension of 1 where the
    query has none.
    """
    arrays = [x if x is None else check_array(name, x, True) for name, x in (("bias", bias), ("mask", mask))]
    bias, mask = (x[0] if x is not None and x.shape[: x.ndim - len(wanted)] == (1,) else x for x in arrays)
    if bias is not None:
        check_floating("bias", bias.dtype)
    if mask is None:
        return bias
    if mask.dtype != bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}: numbers that are added to scores are a bias")
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            check_broadcasts(name, x.shape, wanted)
    if bias is None:
        return mask
    bias, mask = (x.reshape((1,) * (max(bias.ndim, mask.ndim) - x.ndim) + x.shape) for x in (bias, mask))
    return jnp.where(mask, bias, -jnp.inf)
