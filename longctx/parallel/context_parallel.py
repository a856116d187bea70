"""Context-parallel attention of whole arrays: it applies the layout, the exchange and the sharding of the heads."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import (
    Arguments,
    Implementation,
    Window,
    check_arrays,
    check_kernel,
    check_out_dtype,
    check_sinks,
    flatten,
)
from longctx.kernels.attention.rule import BiasFunction
from longctx.parallel.all_gather import all_gather_kv
from longctx.parallel.choose import choose_ring
from longctx.parallel.cost import Hardware, ModelShape
from longctx.parallel.exchange import AttentionSpec, BiasOfRank, check_bias_function
from longctx.parallel.kvp import kvp_attention
from longctx.parallel.layout import Layout, check_layout, layout_hops
from longctx.parallel.mesh_axes import MeshAxes, batch_axis_of, check_axes, check_mesh, spec_of, with_auto_axes
from longctx.parallel.pass_kv import ring_pass_kv
from longctx.parallel.pass_q import ring_pass_q
from longctx.parallel.reshard import pad_sequence, reshard_to_contiguous, reshard_to_layout
from longctx.parallel.topology import hardware_of, is_in_one_host
from longctx.parallel.ulysses import ulysses_attention

_log = logging.getLogger("longctx.parallel")

Method = Literal["auto", "pass_kv", "pass_q", "all_gather", "kvp", "ulysses"]
METHODS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "pass_kv": ring_pass_kv,
    "pass_q": ring_pass_q,
    "all_gather": all_gather_kv,
    "kvp": kvp_attention,
    "ulysses": ulysses_attention,
}


def context_parallel_attention(
    q: Float[ArrayLike, "*B T N H"],
    k: Float[ArrayLike, "*B S K H"],
    v: Float[ArrayLike, "*B S K Hv"],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    method: Method = "auto",
    layout: Layout = "zigzag",
    q_positions: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_positions: Int[ArrayLike, "... S"] | Nested | None = None,
    q_segment_ids: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_segment_ids: Int[ArrayLike, "... S"] | Nested | None = None,
    q_first: Int[ArrayLike, "... T"] | Nested | None = None,
    q_last: Int[ArrayLike, "... T"] | Nested | None = None,
    axis_name: str = "context",
    head_axis: str | None = None,
    batch_axis: str | None = None,
    causal: bool = True,
    window: Window | None = None,
    sinks: Float[ArrayLike, "N"] | None = None,
    logits_soft_cap: Real | None = None,
    bias: BiasFunction | None = None,
    scale: Real | None = None,
    implementation: Implementation | None = None,
    out_dtype: DTypeLike | None = None,
    hardware: Hardware | None = None,
) -> Float[Array, "*B T N Hv"]:
    """Exact attention of whole arrays, computed over the mesh: what `attention(q, k, v, ...)[0]` gives.

    Tokens are sharded over `axis_name` by the layout (queries by the new tokens alone), padded where N does not divide
    them, and put back in order. Contiguous parts become shards by permutes of half-shards (zigzag) or an all-to-all
    (striped), so no rank ever holds a whole sequence. Heads are sharded over `head_axis`, with one ring for each of its
    ranks; KV heads are repeated if it has more ranks than there are KV heads. Works in and outside of jit, where a
    call compiles once for its shapes, with Auto and Explicit mesh axes. Over the other axes the
    work is repeated, except for a batch that is sharded over them.

    Args:
      q: queries, the new tokens, floating point `[*B, T, N, H]`.
      k, v: keys and values, cached and new, `[*B, S, K, H]` and `[*B, S, K, Hv]`.
      mesh: a mesh with `axis_name`. None: that of `jax.set_mesh`.
      method: `"pass_kv"`, `"pass_q"`, `"all_gather"`, `"kvp"` or `"ulysses"`; `"auto"` asks `choose_ring`, for the
        `hardware`, with T new and S - T cached tokens.
      layout: `"contiguous"`, `"zigzag"` or `"striped"`. (`"ulysses"` has equal work on all ranks in any of them, and
        leaves tokens where they are.)
      q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last, causal: as for
        `longctx.kernels.attention`.
      window, sinks, logits_soft_cap, scale, implementation, out_dtype: as for `longctx.kernels.attention`. With a
        window, T = S and positions that are not given, only those hops of `"pass_kv"` are sent that some query needs.
      bias: as for `longctx.kernels.attention`, a function alone, of the heads of all ranks.
      axis_name: the mesh axis over which tokens are sharded.
      head_axis: the mesh axis of the heads. None: `tensor`, if the mesh has it.
      batch_axis: the mesh axis of the batch, of data parallelism, whose ranks divide the product of `*B`. None: with
        Explicit axes, that of the type of q; otherwise a batch that is sharded stays so.
      hardware: what `choose_ring` counts with. None: the devices of the mesh and their link, as `find_topology` finds
        them. The choice is logged as `longctx.parallel`, at level INFO: its first line names the hardware.

    Returns:
      out `[*B, T, N, Hv]` in out_dtype. Differentiable in q, k, v and sinks.

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
    arrays = q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last
    arguments = check_arrays(arrays, causal)
    q, k = arguments.q, arguments.k
    value_size = arguments.v.shape[-1]
    check_bias_function(bias)
    kernel = check_kernel(q, causal, scale, implementation, window, logits_soft_cap, value_size, bias)
    rule = kernel.rule
    sinks = check_sinks(sinks, q)
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
        return jnp.zeros((*q.shape[:-1], value_size), out_dtype)
    if method == "auto":
        if hardware is None:
            hardware = _find_hardware(mesh, axis_name)
        model = ModelShape(num_heads, num_kv_heads, head_size).split(tensor)
        # All times but latency grow with the batch.
        latency = hardware.latency * replicas / batch
        hardware = dataclasses.replace(hardware, bytes_per_element=q.dtype.itemsize, latency=latency)
        before, _ = rule.window
        choice = choose_ring(
            length,
            max(0, kv_length - length),
            num_ranks,
            model,
            hardware,
            with_ulysses=True,
            window=None if before is None else before + 1,
        )
        _log.info("%s", choice)
        method = choice.method  # type: ignore[assignment]
    if method == "ulysses":
        layout = "contiguous"
    spec = AttentionSpec(
        axis_name, rule.causal, rule.scale, kernel.implementation, out_dtype, rule.window, rule.soft_cap, bias
    )
    if bias is not None and head_axis is not None:
        spec = spec._replace(bias=BiasOfRank(bias, head_axis, num_heads // tensor))
    hops = None
    is_one_sequence = length == kv_length and q_positions is None and kv_positions is None
    if method == "pass_kv" and rule.window != (None, None) and is_one_sequence:
        hops = layout_hops(length, num_ranks, layout, causal=rule.causal, window=rule.window)
    return _attend_over_mesh(_StaticArguments(mesh, method, layout, axes, spec, hops), arguments, sinks)


def _find_hardware(mesh: Mesh | AbstractMesh, axis_name: str) -> Hardware:
    if isinstance(mesh, AbstractMesh):  # where its devices are is not known: those of one process are in one host
        return hardware_of(jax.devices()[0], jax.process_count() == 1)
    return hardware_of(mesh.devices.flat[0], is_in_one_host(mesh, axis_name))


class _StaticArguments(NamedTuple):
    """The static arguments of one call."""

    mesh: Mesh | AbstractMesh
    method: Method
    layout: Layout
    axes: MeshAxes
    spec: AttentionSpec
    hops: tuple[int, ...] | None


@functools.partial(jax.jit, static_argnums=0)
def _attend_over_mesh(static: _StaticArguments, arguments: Arguments, sinks: Array | None) -> Array:
    """Compute with Auto mesh axes. With Explicit axes outside, the result gets the sharding of q's type."""
    out_spec = spec_of(arguments.q, static.mesh)
    return with_auto_axes(functools.partial(_sharded_attention, static), static.mesh, (arguments, sinks), out_spec)


def _sharded_attention(
    static: _StaticArguments, mesh: Mesh | AbstractMesh | None, arrays: tuple[Arguments, Array | None]
) -> Array:
    """Shard over `mesh`, or over the mesh of the context if it is None."""
    arguments, sinks = arrays
    axis_name, num_ranks = static.axes.sequence, static.axes.size(static.axes.sequence)
    flat_q, flat_k, flat_v, queries, keys, _ = flatten(arguments)
    if static.axes.head is not None:
        repeats = max(1, static.axes.size(static.axes.head) // flat_k.shape[-2])
        flat_k, flat_v = (jnp.repeat(x, repeats, 2) for x in (flat_k, flat_v))

    # KVP needs its queries on all ranks.
    q_axis = None if static.method == "kvp" else axis_name
    q_layout: Layout = "contiguous" if q_axis is None else static.layout

    def pad_q(x: Array, value: int = 0) -> Array:
        return x if q_axis is None else pad_sequence(x, num_ranks, q_layout, value)

    def pad_kv(x: Array, value: int = 0) -> Array:
        return pad_sequence(x, num_ranks, static.layout, value)

    def local(q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, sinks: Array | None) -> Array:
        if q_axis is not None:
            q, queries = jax.tree.map(lambda x: reshard_to_layout(x, axis_name, q_layout), (q, queries))
        k, v, keys = jax.tree.map(lambda x: reshard_to_layout(x, axis_name, static.layout), (k, v, keys))
        out, _ = METHODS[static.method](
            q,
            k,
            v,
            **_by_name("q", queries),
            **_by_name("kv", keys),
            sinks=sinks,
            **static.spec._asdict(),
            **({} if static.hops is None else {"hops": static.hops}),
        )
        return out if q_axis is None else reshard_to_contiguous(out, axis_name, q_layout)

    def tokens_spec(tokens: Tokens, axis: str | None) -> Any:
        """Positions that all sequences share have a batch of one, which is on all ranks."""
        return jax.tree.map(lambda x: P(static.axes.batch if x.shape[0] > 1 else None, axis), tokens)

    # Along its other axes XLA keeps what is sharded, as a batch; with one device along them there is nothing to keep.
    own = (axis_name, static.axes.head, static.axes.batch)
    q_spec, kv_spec = (P(static.axes.batch, axis, static.axes.head) for axis in (q_axis, axis_name))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            q_spec,
            kv_spec,
            kv_spec,
            tokens_spec(queries, q_axis),
            tokens_spec(keys, axis_name),
            P(static.axes.head),
        ),
        out_specs=q_spec,
        axis_names={name for name, size in static.axes.sizes if name in own or size == 1},
    )
    out = mapped(
        pad_q(flat_q),
        pad_kv(flat_k),
        pad_kv(flat_v),
        jax.tree.map(pad_q, queries)._replace(segments=pad_q(queries.segments, -1)),
        jax.tree.map(pad_kv, keys)._replace(segments=pad_kv(keys.segments, -1)),
        sinks,
    )
    return out[:, : flat_q.shape[1]].reshape(*arguments.q.shape[:-1], out.shape[-1])


def _by_name(side: str, tokens: Tokens) -> dict[str, Array]:
    """The arguments of an exchange; `[1, L]`, which all sequences of a batch share, becomes `[L]`."""
    names = {"positions": "positions", "segments": "segment_ids", "first": "first", "last": "last"}
    given = ((names[name], x) for name, x in tokens._asdict().items() if x is not None)
    return {f"{side}_{name}": x[0] if x.shape[0] == 1 else x for name, x in given}
