"""The axes of a mesh over which whole arrays are sharded, and programs over meshes of Auto and of Explicit axes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P


def check_mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    """Return the mesh, or that of `jax.set_mesh` if it is None; TypeError or ValueError: there is no mesh."""
    if mesh is None:
        mesh = get_abstract_mesh()
        if mesh.empty:
            raise ValueError("mesh must be given, or set by jax.set_mesh")
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    return mesh


def mesh_with_devices(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """Return a mesh on which arrays can be placed: that of `jax.set_mesh` for None and an abstract one.

    ValueError: the mesh is abstract, and not that of `jax.set_mesh`.
    """
    context = get_abstract_mesh()
    if isinstance(mesh, AbstractMesh) and mesh != context:
        raise ValueError(f"mesh must have devices, or be that of jax.set_mesh, {context}, got {mesh}")
    if (mesh is None and not context.empty) or isinstance(mesh, AbstractMesh):
        return context if is_tracing() else jax.sharding.get_mesh()
    return mesh


def place(x: Array, mesh: Mesh | AbstractMesh, spec: P) -> Array:
    """Return x with the sharding, in and outside of jit."""
    if not is_tracing():
        return jax.device_put(x, NamedSharding(mesh, spec))
    if AxisType.Explicit in mesh.axis_types:
        x = jax.device_put(x, NamedSharding(mesh, _of_axes(AxisType.Explicit, spec, mesh)))
    if AxisType.Auto in mesh.axis_types:  # for which jit ignores device_put
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, _of_axes(AxisType.Auto, spec, mesh)))
    return x


def is_tracing() -> bool:
    """Whether new arrays are traced, as under jit."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Which mesh axis shards what. None: none does."""

    sizes: tuple[tuple[str, int], ...]
    sequence: str
    head: str | None
    batch: str | None

    def size(self, name: str | None) -> int:
        """The ranks of an axis, 1 for None."""
        return 1 if name is None else dict(self.sizes)[name]


def check_axes(
    mesh: Mesh | AbstractMesh, axis_name: str, head_axis: str | None = None, batch_axis: str | None = None
) -> MeshAxes:
    """Return the axes of sequences, heads (by default `tensor`) and the batch; ValueError: one is no axis, or taken."""
    if axis_name not in mesh.shape:
        raise ValueError(f"axis_name must be an axis of the mesh, {', '.join(mesh.axis_names)}, got {axis_name!r}")
    if head_axis is None and "tensor" in mesh.shape and "tensor" not in (axis_name, batch_axis):
        head_axis = "tensor"
    for argument, name, others in (
        ("head_axis", head_axis, (axis_name,)),
        ("batch_axis", batch_axis, (axis_name, head_axis)),
    ):
        if name is not None and (name not in mesh.shape or name in others):
            raise ValueError(f"{argument} must be another axis of the mesh, {', '.join(mesh.axis_names)}, got {name!r}")
    return MeshAxes(tuple(mesh.shape.items()), axis_name, head_axis, batch_axis)


def batch_axis_of(q: Array, mesh: Mesh | AbstractMesh, others: Sequence[str | None]) -> str | None:
    """Find the only Explicit axis, none of `others`, that shards the first batch dimension of q `[*B, T, N, H]`."""
    entry, *rest = (*spec_of(q, mesh), *(None,) * q.ndim)[: q.ndim - 3] or (None,)
    names = entry if isinstance(entry, tuple) else (entry,)
    return names[0] if len(names) == 1 and names[0] not in others and not any(rest) else None


def with_auto_axes(
    function: Callable[[Mesh | AbstractMesh | None, Any], Any], mesh: Mesh | AbstractMesh, operands: Any, out_specs: Any
) -> Any:
    """Call `function(mesh, operands)`, in which `jax.shard_map` takes the mesh, whatever the types of its axes.

    With Explicit axes outside, the function is called with None, for the mesh of the context, and its results have the
    shardings of `out_specs`. ValueError: the mesh of the context has another shape.
    """
    context = get_abstract_mesh()
    if context.shape != mesh.shape and (not context.empty or isinstance(mesh, AbstractMesh)):
        raise ValueError(f"mesh must be that of jax.set_mesh, {dict(context.shape)}, got {dict(mesh.shape)}")
    meshes = (context, *(jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)))
    explicit = next((found for found in meshes if AxisType.Explicit in found.axis_types), None)
    if explicit is None:
        if isinstance(mesh, AbstractMesh):
            return function(None, operands)
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
        return function(auto, operands)
    if explicit.shape != mesh.shape:
        raise ValueError(f"mesh must be that of the arrays, {explicit.shape}, got {mesh.shape}")
    shardings = jax.tree.map(
        lambda spec: NamedSharding(explicit, _of_axes(AxisType.Explicit, spec, explicit)),
        out_specs,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    return jax.sharding.auto_axes(lambda operands: function(None, operands), out_sharding=shardings)(operands)


def _of_axes(kind: AxisType, spec: P, mesh: Mesh | AbstractMesh) -> P:
    """The spec without the names of axes of another type."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return P(*(name if types.get(name) == kind else None for name in spec))


def spec_of(x: Array, mesh: Mesh | AbstractMesh) -> P:
    """The PartitionSpec of the type of x over a mesh with Explicit axes; `P()` where it is over another mesh."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if sharding.mesh.shape == mesh.shape else P()
