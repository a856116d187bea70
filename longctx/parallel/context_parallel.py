"""Context-parallel attention of whole arrays: it applies the layout, the exchange and the sharding of the heads."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from longctx.kernels.attention.kernel import Kernel
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import check_kernel, check_operands, check_out_dtype
from longctx.parallel.all_gather import all_gather_kv
from longctx.parallel.choose import choose_ring
from longctx.parallel.cost import H100_RDMA, Hardware, ModelShape
from longctx.parallel.kvp import kvp_attention
from longctx.parallel.layout import check_layout
from longctx.parallel.pass_kv import ring_pass_kv
from longctx.parallel.pass_q import ring_pass_q
from longctx.parallel.reshard import padded_length, reshard_to_contiguous, reshard_to_layout

Masks = tuple[Array | None, Array | None, Array | None, Array | None]

METHODS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "pass_kv": ring_pass_kv,
    "pass_q": ring_pass_q,
    "all_gather": all_gather_kv,
    "kvp": kvp_attention,
}


def context_parallel_attention(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K H"],
    *,
    mesh: Mesh,
    method: str = "auto",
    layout: str = "zigzag",
    q_positions: Int[Array, "... T"] | None = None,
    kv_positions: Int[Array, "... S"] | None = None,
    q_segment_ids: Int[Array, "... T"] | None = None,
    kv_segment_ids: Int[Array, "... S"] | None = None,
    axis_name: str = "context",
    head_axis: str | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    out_dtype: DTypeLike | None = None,
    hardware: Hardware = H100_RDMA,
) -> Float[Array, "*B T N H"]:
    """Exact attention of whole arrays, computed over the mesh: what `attention(q, k, v, ...)[0]` gives.

    Tokens are sharded over `axis_name` by the layout (queries by the new tokens alone), padded where N does not divide
    them, and put back in order. Contiguous parts become shards by permutes of half-shards (zigzag) or an all-to-all
    (striped), so no rank ever holds a whole sequence. Heads are sharded over `head_axis`, with one ring for each of its
    ranks; KV heads are repeated if it has more ranks than there are KV heads. Works in and outside of jit, with Auto
    and Explicit mesh axes; the work is repeated over the other axes of the mesh.

    Args:
      q: queries, the new tokens, `[*B, T, N, H]`.
      k, v: keys and values, cached and new, `[*B, S, K, H]`.
      mesh: a mesh with `axis_name`.
      method: `"pass_kv"`, `"pass_q"`, `"all_gather"` or `"kvp"`; `"auto"` asks `choose_ring`, for the `hardware`, with
        T new and S - T cached tokens.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`.
      head_axis: the mesh axis of the heads. None: `tensor`, if the mesh has it.
      q_positions, kv_positions, q_segment_ids, kv_segment_ids, causal, scale, implementation, out_dtype: as in
        `longctx.kernels.attention`.

    Returns:
      out `[*B, T, N, H]`. Differentiable in q, k and v.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Source: context parallelism paper, 3.5 and figure 5.
    """
    masks: Masks = (_array(q_positions), _array(kv_positions), _array(q_segment_ids), _array(kv_segment_ids))
    jax.eval_shape(lambda: check_operands(q, k, v, *masks, causal=causal))  # the checks alone
    kernel = check_kernel(q, causal, scale, implementation)
    out_dtype = check_out_dtype(out_dtype, q.dtype)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if axis_name not in mesh.shape:
        raise ValueError(f"axis_name must be an axis of the mesh, {', '.join(mesh.axis_names)}, got {axis_name!r}")
    if head_axis is None and axis_name != "tensor" and "tensor" in mesh.shape:
        head_axis = "tensor"
    if head_axis is not None and (head_axis not in mesh.shape or head_axis == axis_name):
        raise ValueError(f"head_axis must be another axis of the mesh, {', '.join(mesh.axis_names)}, got {head_axis!r}")
    num_ranks, tensor = mesh.shape[axis_name], 1 if head_axis is None else mesh.shape[head_axis]
    check_layout(num_ranks, layout)
    num_heads, num_kv_heads, head_size = q.shape[-2], k.shape[-2], q.shape[-1]
    if num_heads % tensor or (num_kv_heads % tensor and tensor % num_kv_heads):
        raise ValueError(
            f"the {tensor} ranks of head_axis {head_axis!r} must divide q's {num_heads} heads, and divide or be a "
            f"multiple of k's {num_kv_heads}"
        )
    if not isinstance(hardware, Hardware):
        raise TypeError(f"hardware must be a longctx.parallel.Hardware, got {type(hardware).__name__}")
    if method not in ["auto", *METHODS]:
        raise ValueError(f"method must be 'auto' or one of {', '.join(METHODS)}, got {method!r}")
    length, kv_length = q.shape[-3], k.shape[-3]
    if 0 in (q.size, kv_length):
        return jnp.zeros(q.shape, out_dtype)
    if method == "auto":
        model = ModelShape(num_heads, num_kv_heads, head_size).split(tensor)
        # All times but latency grow with the batch.
        batch = math.prod(q.shape[:-3])
        hardware = dataclasses.replace(hardware, bytes_per_element=q.dtype.itemsize, latency=hardware.latency / batch)
        method = choose_ring(length, max(0, kv_length - length), num_ranks, model, hardware).method
    static = _StaticArguments(mesh, method, layout, axis_name, head_axis, kernel, out_dtype)
    return _mesh_attention(static, q, k, v, masks)


def _array(x: Any) -> Any:
    return x if x is None or isinstance(x, jax.Array) else np.asarray(x)


class _StaticArguments(NamedTuple):
    """The static arguments of one call."""

    mesh: Mesh
    method: str
    layout: str
    axis_name: str
    head_axis: str | None
    kernel: Kernel
    out_dtype: jnp.dtype


@functools.partial(jax.jit, static_argnums=0)
def _mesh_attention(static: _StaticArguments, q: Array, k: Array, v: Array, masks: Masks) -> Array:
    """Compute with Auto mesh axes. With Explicit axes outside, the result gets the sharding of q's type."""
    shardings = [jax.typeof(x).sharding for x in jax.tree.leaves((q, k, v, masks))]
    explicit = next((s for s in shardings if AxisType.Explicit in s.mesh.axis_types), None)
    if explicit is None:
        mesh = Mesh(static.mesh.devices, static.mesh.axis_names, axis_types=(AxisType.Auto,) * static.mesh.devices.ndim)
        return _sharded_attention(static, mesh, q, k, v, masks)
    if explicit.mesh.shape != static.mesh.shape:
        raise ValueError(f"mesh must be that of the arrays, {explicit.mesh.shape}, got {static.mesh.shape}")
    of_q = shardings[0].spec if shardings[0].mesh.shape == static.mesh.shape else P()
    sharding = NamedSharding(explicit.mesh, of_q)
    return jax.sharding.auto_axes(functools.partial(_sharded_attention, static, None), out_sharding=sharding)(
        q, k, v, masks
    )


def _sharded_attention(
    static: _StaticArguments, mesh: Mesh | None, q: Array, k: Array, v: Array, masks: Masks
) -> Array:
    """Shard over `mesh`, or over the mesh of the context if it is None."""
    axis_name, num_ranks = static.axis_name, static.mesh.shape[static.axis_name]
    flat_q, flat_k, flat_v, queries, keys = check_operands(q, k, v, *masks, causal=static.kernel.causal)
    if static.head_axis is not None:
        repeats = max(1, static.mesh.shape[static.head_axis] // k.shape[-2])
        flat_k, flat_v = (jnp.repeat(x, repeats, 2) for x in (flat_k, flat_v))

    # KVP needs its queries on all ranks.
    q_axis, q_layout = (None, "contiguous") if static.method == "kvp" else (axis_name, static.layout)

    def pad(x: Array, layout: str, value: int = 0) -> Array:
        missing = padded_length(x.shape[1], num_ranks, layout) - x.shape[1]
        return jnp.pad(x, [(0, missing * (axis == 1)) for axis in range(x.ndim)], constant_values=value)

    def local(q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens) -> Array:
        if q_axis is not None:
            q, queries = jax.tree.map(lambda x: reshard_to_layout(x, axis_name, q_layout), (q, queries))
        k, v, keys = jax.tree.map(lambda x: reshard_to_layout(x, axis_name, static.layout), (k, v, keys))
        out, _ = METHODS[static.method](
            q,
            k,
            v,
            q_positions=_drop_batch(queries.positions),
            kv_positions=_drop_batch(keys.positions),
            q_segment_ids=_drop_batch(queries.segments),
            kv_segment_ids=_drop_batch(keys.segments),
            axis_name=axis_name,
            causal=static.kernel.causal,
            scale=static.kernel.scale,
            implementation=static.kernel.implementation,
            out_dtype=static.out_dtype,
        )
        return out if q_axis is None else reshard_to_contiguous(out, axis_name, q_layout)

    q_spec, kv_spec = (P(None, axis, static.head_axis) for axis in (q_axis, axis_name))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(q_spec, kv_spec, kv_spec, P(None, q_axis), P(None, axis_name)),
        out_specs=q_spec,
    )
    out = mapped(
        pad(flat_q, q_layout),
        pad(flat_k, static.layout),
        pad(flat_v, static.layout),
        Tokens(pad(queries.positions, q_layout), pad(queries.segments, q_layout, -1)),
        Tokens(pad(keys.positions, static.layout), pad(keys.segments, static.layout, -1)),
    )
    return out[:, : q.shape[-3]].reshape(q.shape)


def _drop_batch(x: Array) -> Array:
    """`[1, L]`, which all sequences of a batch share, as `[L]`; `[B, L]` as it is."""
    return x[0] if x.shape[0] == 1 else x
