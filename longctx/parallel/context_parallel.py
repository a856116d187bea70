"""Context-parallel attention of whole arrays: it applies the layout, the exchange and the sharding of the heads."""

import dataclasses
import logging
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels.attention.operands import check_arrays, check_kernel, check_out_dtype
from longctx.parallel.choose import choose_ring
from longctx.parallel.cost import Hardware, ModelShape
from longctx.parallel.layout import check_layout
from longctx.parallel.mesh_attention import METHODS, StaticArguments, mesh_attention
from longctx.parallel.mesh_axes import batch_axis_of, check_axes, check_mesh
from longctx.parallel.topology import hardware_of, is_in_one_host

_log = logging.getLogger("longctx.parallel")


def context_parallel_attention(
    q: Float[ArrayLike, "*B T N H"],
    k: Float[ArrayLike, "*B S K H"],
    v: Float[ArrayLike, "*B S K H"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    method: str = "auto",
    layout: str = "zigzag",
    q_positions: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_positions: Int[ArrayLike, "... S"] | Nested | None = None,
    q_segment_ids: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_segment_ids: Int[ArrayLike, "... S"] | Nested | None = None,
    axis_name: str = "context",
    head_axis: str | None = None,
    batch_axis: str | None = None,
    causal: bool = True,
    scale: Real | None = None,
    implementation: str | None = None,
    out_dtype: DTypeLike | None = None,
    hardware: Hardware | None = None,
) -> Float[Array, "*B T N H"]:
    """Exact attention of whole arrays, computed over the mesh: what `attention(q, k, v, ...)[0]` gives.

    Tokens are sharded over `axis_name` by the layout (queries by the new tokens alone), padded where N does not divide
    them, and put back in order. Contiguous parts become shards by permutes of half-shards (zigzag) or an all-to-all
    (striped), so no rank ever holds a whole sequence. Heads are sharded over `head_axis`, with one ring for each of its
    ranks; KV heads are repeated if it has more ranks than there are KV heads. Works in and outside of jit, where a
    call compiles once for its shapes, with Auto and Explicit mesh axes. Over the other axes the
    work is repeated, except for a batch that is sharded over them.

    Args:
      q: queries, the new tokens, floating point `[*B, T, N, H]`.
      k, v: keys and values, cached and new, `[*B, S, K, H]`.
      mesh: a mesh with `axis_name`. None: that of `jax.set_mesh`.
      method: `"pass_kv"`, `"pass_q"`, `"all_gather"` or `"kvp"`; `"auto"` asks `choose_ring`, for the `hardware`, with
        T new and S - T cached tokens.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`.
      q_positions, kv_positions, q_segment_ids, kv_segment_ids, causal, scale, implementation, out_dtype: as for
        `longctx.kernels.attention`.
      axis_name: the mesh axis over which tokens are sharded.
      head_axis: the mesh axis of the heads. None: `tensor`, if the mesh has it.
      batch_axis: the mesh axis of the batch, of data parallelism, whose ranks divide the product of `*B`. None: with
        Explicit axes, that of the type of q; otherwise a batch that is sharded stays so.
      hardware: what `choose_ring` counts with. None: the devices of the mesh and their link, as `find_topology` finds
        them. The choice is logged as `longctx.parallel`, at level INFO: its first line names the hardware.

    Returns:
      out `[*B, T, N, H]` in out_dtype. Differentiable in q, k and v.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Source:
      Context parallelism paper, 3.5 and figure 5.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels import attention
      >>> from longctx.parallel import context_parallel_attention, make_mesh, use_devices
      >>> use_devices(8)
      >>> mesh = make_mesh(context=4, tensor=2)
      >>> q = jax.random.normal(jax.random.key(0), (1, 30, 4, 16))  # 30 tokens, 4 heads; 4 devices don't divide 30
      >>> k, v = jax.random.normal(jax.random.key(1), (2, 1, 30, 2, 16))
      >>> out = context_parallel_attention(q, k, v, mesh=mesh, method="pass_kv", layout="zigzag")
      >>> bool(jnp.allclose(out, attention(q, k, v)[0], atol=1e-5))
      True
    """
    arguments = check_arrays(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, causal)
    q, k = arguments.q, arguments.k
    kernel = check_kernel(q, causal, scale, implementation)
    out_dtype = check_out_dtype(out_dtype, q.dtype)
    mesh = check_mesh(mesh)
    axes = check_axes(mesh, axis_name, head_axis, batch_axis or batch_axis_of(q, mesh, (axis_name, head_axis)))
    head_axis, batch = axes.head, math.prod(q.shape[:-3])
    num_ranks, tensor, replicas = (axes.size(name) for name in (axis_name, head_axis, axes.batch))
    if batch % replicas:
        raise ValueError(f"the {replicas} ranks of batch_axis {batch_axis!r} must divide the batch of {batch}")
    check_layout(num_ranks, layout)
    num_heads, num_kv_heads, head_size = q.shape[-2], k.shape[-2], q.shape[-1]
    if num_heads % tensor or (num_kv_heads % tensor and tensor % num_kv_heads):
        raise ValueError(
            f"the {tensor} ranks of head_axis {head_axis!r} must divide q's {num_heads} heads, and divide or be a "
            f"multiple of k's {num_kv_heads}"
        )
    if not isinstance(hardware, Hardware | None):
        raise TypeError(f"hardware must be a longctx.parallel.Hardware, got {type(hardware).__name__}")
    if method not in ["auto", *METHODS]:
        raise ValueError(f"method must be 'auto' or one of {', '.join(METHODS)}, got {method!r}")
    length, kv_length = q.shape[-3], k.shape[-3]
    if 0 in (q.size, kv_length):
        return jnp.zeros(q.shape, out_dtype)
    if method == "auto":
        if hardware is None:
            hardware = _find_hardware(mesh, axis_name)
        model = ModelShape(num_heads, num_kv_heads, head_size).split(tensor)
        # All times but latency grow with the batch.
        latency = hardware.latency * replicas / batch
        hardware = dataclasses.replace(hardware, bytes_per_element=q.dtype.itemsize, latency=latency)
        choice = choose_ring(length, max(0, kv_length - length), num_ranks, model, hardware)
        _log.info("%s", choice)
        method = choice.method
    static = StaticArguments(mesh, method, layout, axes, kernel, out_dtype)
    return mesh_attention(static, arguments)


def _find_hardware(mesh: Mesh | AbstractMesh, axis_name: str) -> Hardware:
    if isinstance(mesh, AbstractMesh):  # where its devices are is not known: those of one process are in one host
        return hardware_of(jax.devices()[0], jax.process_count() == 1)
    return hardware_of(mesh.devices.flat[0], is_in_one_host(mesh, axis_name))
