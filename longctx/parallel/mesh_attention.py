"""Attention of whole arrays inside a mesh program: shards are made, exchanged over and put back in order."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from longctx.kernels.attention.kernel import Kernel
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.operands import Arguments, flatten
from longctx.parallel.all_gather import all_gather_kv
from longctx.parallel.kvp import kvp_attention
from longctx.parallel.mesh_axes import MeshAxes, spec_of, with_auto_axes
from longctx.parallel.pass_kv import ring_pass_kv
from longctx.parallel.pass_q import ring_pass_q
from longctx.parallel.reshard import pad_sequence, reshard_to_contiguous, reshard_to_layout

METHODS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "pass_kv": ring_pass_kv,
    "pass_q": ring_pass_q,
    "all_gather": all_gather_kv,
    "kvp": kvp_attention,
}


class StaticArguments(NamedTuple):
    """The static arguments of one call."""

    mesh: Mesh | AbstractMesh
    method: str
    layout: str
    axes: MeshAxes
    kernel: Kernel
    out_dtype: jnp.dtype


@functools.partial(jax.jit, static_argnums=0)
def mesh_attention(static: StaticArguments, arguments: Arguments) -> Array:
    """Compute with Auto mesh axes. With Explicit axes outside, the result gets the sharding of q's type."""
    out_spec = spec_of(arguments.q, static.mesh)
    return with_auto_axes(functools.partial(_sharded_attention, static), static.mesh, arguments, out_spec)


def _sharded_attention(static: StaticArguments, mesh: Mesh | AbstractMesh | None, arguments: Arguments) -> Array:
    """Shard over `mesh`, or over the mesh of the context if it is None."""
    axis_name, num_ranks = static.axes.sequence, static.axes.size(static.axes.sequence)
    flat_q, flat_k, flat_v, queries, keys = flatten(arguments)
    if static.axes.head is not None:
        repeats = max(1, static.axes.size(static.axes.head) // flat_k.shape[-2])
        flat_k, flat_v = (jnp.repeat(x, repeats, 2) for x in (flat_k, flat_v))

    # KVP needs its queries on all ranks.
    q_axis, q_layout = (None, "contiguous") if static.method == "kvp" else (axis_name, static.layout)

    def pad_q(x: Array, value: int = 0) -> Array:
        return x if q_axis is None else pad_sequence(x, num_ranks, q_layout, value)

    def pad_kv(x: Array, value: int = 0) -> Array:
        return pad_sequence(x, num_ranks, static.layout, value)

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

    def tokens_spec(tokens: Tokens, axis: str | None) -> Any:
        """Positions that all sequences share have a batch of one, which is on all ranks."""
        return jax.tree.map(lambda x: P(static.axes.batch if x.shape[0] > 1 else None, axis), tokens)

    # Along its other axes XLA keeps what is sharded, as a batch; with one device along them there is nothing to keep.
    own = (axis_name, static.axes.head, static.axes.batch)
    q_spec, kv_spec = (P(static.axes.batch, axis, static.axes.head) for axis in (q_axis, axis_name))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(q_spec, kv_spec, kv_spec, tokens_spec(queries, q_axis), tokens_spec(keys, axis_name)),
        out_specs=q_spec,
        axis_names={name for name, size in static.axes.sizes if name in own or size == 1},
    )
    out = mapped(
        pad_q(flat_q),
        pad_kv(flat_k),
        pad_kv(flat_v),
        Tokens(pad_q(queries.positions), pad_q(queries.segments, -1)),
        Tokens(pad_kv(keys.positions), pad_kv(keys.segments, -1)),
    )
    return out[:, : flat_q.shape[1]].reshape(arguments.q.shape)


def _drop_batch(x: Array) -> Array:
    """`[1, L]`, which all sequences of a batch share, as `[L]`; `[B, L]` as it is."""
    return x[0] if x.shape[0] == 1 else x
