"""A KV cache whose slots are sharded over a mesh axis; a rank fills its own slots, in the order in which rows come."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from longctx.parallel.mesh_axes import MeshAxes, with_auto_axes


class Entries(NamedTuple):
    """Keys and values `[B, L, K, H]` with int32 positions and segment ids `[B, L]`, or their PartitionSpecs.

    Segment -1 is an empty slot.
    """

    key: Any
    value: Any
    positions: Any
    segments: Any


def entry_specs(axes: MeshAxes) -> Entries:
    """The PartitionSpecs of a cache."""
    rows = P(axes.batch, axes.sequence)
    heads = P(axes.batch, axes.sequence, axes.head)
    return Entries(heads, heads, rows, rows)


def append(
    mesh: Mesh | AbstractMesh, axes: MeshAxes, cache: Entries, new: Entries, length: Array, spread: Array
) -> tuple[Entries, Array, Array]:
    """Store T new rows. Where they are many, each rank stores those that it has, and nothing moves.

    Rows in equal parts of the ranks are stored by the ranks that have them. The rest, fewer than ranks (one token of a
    decode, say), is stored by one rank after the other. So all ranks fill evenly, to a row.

    Args:
      cache: `[B, L, ...]`, L a multiple of the ranks.
      new: `[B, T, ...]`.
      length: int32, rows that the cache has; the caller sees to it that there is room.
      spread: int32, those of them that were stored by one rank after the other.

    Returns:
      (the cache, length, spread) with the new rows.
    """
    ranks = axes.size(axes.sequence)
    num_new = new.key.shape[1]
    num_rest = num_new % ranks
    num_equal = num_new - num_rest
    specs = entry_specs(axes)
    rest_specs = Entries(*(P(spec[0], None, *spec[2:]) for spec in specs))

    def local(cache: Entries, equal: Entries, rest: Entries, length: Array, spread: Array) -> Entries:
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

    def program(mesh: Any, operands: Any) -> Entries:
        return jax.shard_map(local, mesh=mesh, in_specs=(specs, specs, rest_specs, P(), P()), out_specs=specs)(
            *operands
        )

    parts = (jax.tree.map(lambda x: x[:, :num_equal], new), jax.tree.map(lambda x: x[:, num_equal:], new))
    cache = with_auto_axes(program, mesh, (cache, *parts, length, spread), specs)
    return cache, length + num_new, spread + num_rest


def _update(cache: Entries, new: Entries, slots: Array) -> Entries:
    """Write rows into slots; those out of range are dropped."""
    return jax.tree.map(lambda x, y: x.at[:, slots].set(y.astype(x.dtype), mode="drop"), cache, new)
