"""Division of functions over a mesh: one rule for each, whatever the types of the mesh's axes.

XLA can't divide loops whose ranges depend on data, nor Pallas kernels: it gathers their operands on every device. A
`Rule` says which dimensions of operands and results are one thing, of which a device may compute a part.

- Auto axes: XLA learns the rule (`custom_partitioning`), and calls back with the shardings that it found.
- Explicit axes: types say how operands are sharded, so the function runs in `jax.shard_map`.
- Manual axes alone, as in `jax.shard_map` over all axes: the function is called as it is.

This module is also the adapter of one private name, `_to_xla_hlo_sharding`. Inside `jax.shard_map` over some axes of a
mesh, XLA tells how the other axes shard an operand without their names, and only that method compares shardings without
devices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from longctx.kernels.device import INTERPRETER, Device, compiled_for

Tree = TypeVar("Tree")
Function = Callable[..., tuple[Array, ...]]
Fold = Callable[..., tuple[Array, ...]]
Labels = tuple[str, ...]
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A label for each dimension of operands and results.

    Dimensions of one label are divided alike. An empty label is never divided, and a dimension of size 1 must have it.
    `"k g"` labels query heads where `"k"` labels KV heads, each of which serves a group of query heads. A result that
    lacks a label of the operands is summed over the devices that divide it.

    Attributes:
      names: of the operands that must not be sharded along dimensions without a label, for errors; empty for those that
        are gathered.
      operands, results: the labels of each.
      splits_groups: whether devices may share a KV head where there are more devices than KV heads. Each then slices
        its KV head out of operands that hold several.
      has_constants: whether the function may hold arrays, as a user's function in it does.
    """

    names: tuple[str, ...]
    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    splits_groups: bool = True
    has_constants: bool = False


def without_ones(shape: Sequence[int], labels: Labels) -> Labels:
    """The labels, without those of dimensions of size 1."""
    return tuple("" if length == 1 else label for length, label in zip(shape, labels, strict=True))


def partitioned(function: Function, rule: Rule, fold: Fold | None, *operands: Array) -> tuple[Array, ...]:
    """`function(*operands)`, divided over the mesh as the rule says.

    Args:
      function: takes and returns arrays alone, and is called with a device's parts of them.
      rule: labels the dimensions of operands and results.
      fold: `fold(size, mapped, *operands)` are the results of `jax.vmap`, with the mapped dimension first in the
        operands that `mapped` tells and in all results. None: the mapped function is not divided.

    Raises:
      ValueError: with Explicit axes, an operand is sharded along a dimension that is never divided.
    """
    meshes = (get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in operands))
    mesh = next((mesh for mesh in meshes if not mesh.empty), AbstractMesh((), ()))
    # JAX refuses the operation in a program of one device whose arrays are on several meshes of it.
    is_one = mesh.size == 1 and not mesh.empty
    if INTERPRETER.get() is not None or is_one or set(mesh.axis_types) == {AxisType.Manual}:
        return function(*operands)

    is_explicit = AxisType.Explicit in mesh.axis_types

    def over_explicit_axes(*operands: Array) -> tuple[Array, ...]:
        return _over_explicit_axes(function, rule, operands, mesh)

    @jax.custom_batching.custom_vmap
    def divided(*operands: Array) -> tuple[Array, ...]:
        return over_explicit_axes(*operands) if is_explicit else _over_auto_axes(function, rule, mesh)(*operands)

    @divided.def_vmap
    def _(size: int, mapped: Sequence[bool], *operands: Array) -> Any:
        if fold is None:
            results = jax.vmap(function, [0 if is_mapped else None for is_mapped in mapped])(*operands)
        else:
            results = fold(size, mapped, *operands)
        return results, (True,) * len(results)

    # Neither a rule for `jax.vmap` nor XLA's operation has derivatives: with Auto axes they are not divided.
    differentiable = jax.custom_jvp(divided)
    differentiable.defjvp(functools.partial(jax.jvp, over_explicit_axes if is_explicit else function))
    return differentiable(*operands)


def match_sharding(x: Array, like: Array) -> Array:
    """Return x with the sharding of the type of `like`, which has its shape; only Explicit axes are in types."""
    found, wanted = jax.typeof(x).sharding, jax.typeof(like).sharding
    return x if found == wanted or AxisType.Explicit not in wanted.mesh.axis_types else jax.sharding.reshard(x, wanted)


def match_varying(operands: Tree, axis_name: str | None = None) -> Tree:
    """Inside `shard_map`, cast all arrays of a tree to vary over the union of their mesh axes (and `axis_name`).

    Loop carries need it. Callers cast outside the custom VJP, so that the gradient of a replicated operand is summed
    over the mesh.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands)))
    if axis_name is not None:
        axes |= {axis_name}

    return jax.tree.map(functools.partial(vary_over, axes), operands)


def vary_over(axes: frozenset[str], x: Array) -> Array:
    """Inside `shard_map`, cast an array to vary over these mesh axes too."""
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return lax.pcast(x, missing, to="varying") if missing else x


def _over_explicit_axes(function: Function, rule: Rule, operands: Sequence[Array], mesh: AbstractMesh) -> Any:
    """Run in `jax.shard_map` over the Explicit axes; axes of other types keep theirs inside."""
    sizes = _sizes(mesh, AxisType.Explicit)
    found = [_dims(jax.typeof(x).sharding.spec, x.ndim) for x in operands]
    for name, x, labels, dims in zip(rule.names, operands, rule.operands, found, strict=True):
        for at, (label, axes) in enumerate(zip(labels, dims, strict=True)):
            if name and not label and math.prod(sizes[axis] for axis in axes) > 1:
                raise ValueError(
                    f"{name} of {x.shape} is sharded over {', '.join(axes)} along dimension {at}, which every device "
                    "must hold whole: jax.sharding.reshard it, or exchange it over that axis "
                    "(longctx.parallel.context_parallel_attention; ring_pass_kv and others inside jax.shard_map)"
                )
    division = _Division.of(rule, [x.shape for x in operands], sizes, found)
    placed = [
        jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, division.operands, strict=True)
    ]

    has_auto = AxisType.Auto in mesh.axis_types

    def local(*operands: Array) -> tuple[Array, ...]:
        inner = _over_auto_axes(function, rule, get_abstract_mesh()) if has_auto else function
        return division.local(inner)(*match_varying(operands))

    # Inside `jax.vmap`, `jax.shard_map` refuses the name of the axis that shards the mapped dimension. So the default
    # serves where all axes are Explicit, and beside automatic ones those that divide something are named.
    named = {*itertools.chain(*division.axes.values())} if has_auto else set(sizes)
    if not named:
        return local(*placed)
    names: Any = {} if len(sizes) == len(mesh.axis_names) else {"axis_names": named}
    specs: Any = {"in_specs": tuple(division.operands), "out_specs": tuple(division.results)}
    return jax.shard_map(local, mesh=mesh, **specs, **names)(*placed)


def _over_auto_axes(function: Function, rule: Rule, mesh: AbstractMesh, whole: Function | None = None) -> Function:
    """The function as one operation that XLA divides by the rule. JAX drops the operation where one device compiles.

    `whole` is the function without constants, for all of the operands. None: the function has none.
    """
    free = _sizes(mesh, AxisType.Auto) if AxisType.Manual in mesh.axis_types else {}
    device = Device.target()  # XLA calls back when the mesh of the context may be gone

    def divide(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Mesh, _Division]:
        arrays = (*operands, *results)
        mesh = _fine_mesh(mesh, free, arrays[0].sharding)
        found = [_decode(x, mesh) for x in arrays]
        return mesh, _Division.of(rule, [x.shape for x in operands], dict(mesh.shape), found, sums=not free)

    def partition(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        mesh, division = divide(mesh, operands, results)

        def local(*operands: Array) -> tuple[Array, ...]:
            # XLA divides what JAX lowers here: constraints of Explicit axes around it would be left in it.
            with use_abstract_mesh(AbstractMesh((), ())):
                return division.local(function)(*operands)

        shardings = ([NamedSharding(mesh, spec) for spec in specs] for specs in (division.results, division.operands))
        return mesh, compiled_for(device)(local), *map(tuple, shardings)

    def infer(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        mesh, division = divide(mesh, operands, ())
        return tuple(NamedSharding(mesh, spec) for spec in division.results)

    if rule.has_constants:
        return functools.partial(_with_constants, function, rule, mesh)
    operation = custom_partitioning(lambda *operands: (whole or function)(*operands))
    operation.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,  # JAX knows no parts of axes
        sharding_rule=lambda mesh, operands, results: _for_shardy(rule, operands),
    )
    return operation


def _with_constants(function: Function, rule: Rule, mesh: AbstractMesh, *operands: Array) -> Any:
    """Make operands, which every device has whole, of the arrays that a function holds: the operation refuses them."""
    closed = jax.make_jaxpr(function)(*operands)
    constants = [jnp.asarray(x) for x in closed.consts]

    def of_part(*arrays: Array) -> tuple[Array, ...]:
        # Traced again, as Manual axes, which are in the types of the jaxpr, are unknown when XLA calls back.
        return function(*arrays[: len(operands)])

    def of_whole(*arrays: Array) -> tuple[Array, ...]:
        of_call, of_function = arrays[: len(operands)], arrays[len(operands) :]
        return tuple(jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, list(of_function)))(*of_call))

    names = (*rule.names, *("",) * len(constants))
    whole = (*rule.operands, *(("",) * x.ndim for x in constants))
    open_rule = dataclasses.replace(rule, names=names, operands=whole, has_constants=False)
    return _over_auto_axes(of_part, open_rule, mesh, of_whole)(*operands, *constants)


def _for_shardy(rule: Rule, operand_types: Sequence[Any]) -> SdyShardingRule:
    """The rule in Shardy's terms. A dimension without a label is a factor of its own."""
    lengths = _lengths(rule, [x.shape for x in operand_types])
    own = (f"own{number}" for number in itertools.count())

    def mapping(labels: Labels) -> ArrayMapping:
        dims = ([factor for factor in label.split() if lengths[factor] > 1] for label in labels)
        return ArrayMapping(*(CompoundFactor(*dim) if len(dim) > 1 else dim[0] if dim else next(own) for dim in dims))

    operands, results = (tuple(map(mapping, arrays)) for arrays in (rule.operands, rule.results))
    whole = {dim for array in (*operands, *results) for dim in array if isinstance(dim, str)}
    factors = {factor for array in (*operands, *results) for dim in array if not isinstance(dim, str) for factor in dim}
    sizes = {factor: lengths[factor] for factor in factors - whole}
    return SdyShardingRule(operands, results, **sizes)  # type: ignore[arg-type]


class _Division:
    """Which mesh axes divide what.

    Attributes:
      operands, results: the PartitionSpecs.
    """

    def __init__(self, rule: Rule, lengths: dict[str, int], sizes: dict[str, int]) -> None:
        self.rule, self.lengths, self.sizes = rule, lengths, sizes
        self.axes: dict[str, Axes] = {}  # of each factor of a label

    @classmethod
    def of(
        cls,
        rule: Rule,
        shapes: Sequence[Sequence[int]],
        sizes: dict[str, int],
        found: Sequence[Sequence[Axes]],
        sums: bool = True,
    ) -> "_Division":
        """Choose from the axes found to shard the dimensions of operands and results; the first found decide.

        Args:
          sums: whether devices may exchange results. If not, nothing is divided that needs it.
        """
        division, taken = cls(rule, _lengths(rule, shapes), sizes), set[str]()
        for labels, dims in zip((*rule.operands, *rule.results), found, strict=False):
            for label, names in zip(labels, dims, strict=True):
                factors = label.split()
                if factors and names and not taken & {*names} and not division.axes.keys() & {*factors}:
                    new = division._divisible(factors, names, sums)
                    division.axes |= new
                    taken.update(itertools.chain(*new.values()))
        return division

    def _divisible(self, factors: list[str], names: Axes, sums: bool) -> dict[str, Axes]:
        """As many of the axes as divide the factors of a label."""
        if not sums:
            factors = [x for x in factors if all(x in " ".join(labels).split() for labels in self.rule.results)]
        if not factors:
            return {}
        first, *rest = factors
        prefix = names
        while self.lengths[first] % self._size(prefix):
            prefix = prefix[:-1]
        held, ranks = self.lengths[first] // self._size(prefix), self._size(names[len(prefix) :])
        shares = ranks % held == 0 and (held == 1 or sums) and self.rule.splits_groups
        if rest and shares and self.lengths[rest[0]] % (ranks // held) == 0:
            return {first: prefix, rest[0]: names[len(prefix) :]}
        return {first: prefix}

    def _size(self, names: Axes) -> int:
        return math.prod(self.sizes[name] for name in names)

    def _spec(self, labels: Labels) -> P:
        return P(*(tuple(axis for factor in x.split() for axis in self.axes.get(factor, ())) or None for x in labels))

    @property
    def operands(self) -> list[P]:
        return [self._spec(labels) for labels in self.rule.operands]

    @property
    def results(self) -> list[P]:
        return [self._spec(labels) for labels in self.rule.results]

    def local(self, function: Function) -> Function:
        """The function of a device's parts of the operands, which returns its parts of the results."""
        sharing = self.axes.get("g", ())  # the devices of these axes share KV heads
        held = self.lengths.get("k", 1) // self._size(self.axes.get("k", ()))
        slices = held > 1 and self._size(sharing) > 1

        def kv_head() -> Array:
            return lax.axis_index(sharing) // (self._size(sharing) // held)

        def call(*operands: Array) -> tuple[Array, ...]:
            parts = [
                lax.dynamic_slice_in_dim(x, kv_head(), 1, labels.index("k")) if slices and "k" in labels else x
                for labels, x in zip(self.rule.operands, operands, strict=True)
            ]
            return tuple(map(complete, self.rule.results, function(*parts)))

        def complete(labels: Labels, x: Array) -> Array:
            if slices and "k" in labels:
                at = labels.index("k")
                whole = jnp.zeros_like(x, shape=(*x.shape[:at], held, *x.shape[at + 1 :]))
                x = lax.dynamic_update_slice_in_dim(whole, x, kv_head(), at)
            lacking = self.axes.keys() - {*" ".join(labels).split()}
            summed = tuple(axis for factor in self.axes if factor in lacking for axis in self.axes[factor])
            return lax.psum(x, summed) if summed else x

        return call


def _lengths(rule: Rule, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The length of each factor of the labels."""
    dims = [dim for array in zip(rule.operands, shapes, strict=True) for dim in zip(*array, strict=True)]
    lengths = {label: length for label, length in dims if label and " " not in label}
    for label, length in dims:
        if " " in label:
            first, second = label.split()
            lengths[second] = length // lengths.setdefault(first, 1)
    return lengths


def _dims(spec: P, ndim: int) -> list[Axes]:
    """The axes of each dimension."""
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return [entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else () for entry in entries]


def _sizes(mesh: AbstractMesh, kind: AxisType) -> dict[str, int]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, found in types if found == kind}


def _fine_mesh(mesh: Mesh, free: dict[str, int], sharding: Any) -> Mesh:
    """A mesh whose axes are the prime factors of the axes of another, as XLA may shard over a part of an axis.

    Inside `jax.shard_map` over other axes JAX passes an empty mesh, and `free` are the axes. Only places in the mesh
    count, not which devices are there.
    """
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    sizes = free or dict(mesh.shape) or {"devices": len(devices)}
    fine = {f"{name}.{at}": prime for name, size in sizes.items() for at, prime in enumerate(_primes(size))}
    return Mesh(np.array(devices[: math.prod(fine.values())]).reshape(*fine.values()), tuple(fine))


def _primes(number: int) -> list[int]:
    found, prime = list[int](), 2
    while number > 1:
        while number % prime == 0:
            found, number = [*found, prime], number // prime
        prime += 1
    return found


def _decode(x: Any, mesh: Mesh) -> list[Axes]:
    """The axes of each dimension of x, of which XLA gives the sharding without names; none if that has no such form."""
    try:
        counts = [whole // part for whole, part in zip(x.shape, x.sharding.shard_shape(x.shape), strict=True)]
    except ValueError:  # parts of several sizes
        return [()] * x.ndim
    wanted = x.sharding._to_xla_hlo_sharding(x.ndim)
    for dims in _assignments(counts, dict(mesh.shape)):
        if NamedSharding(mesh, P(*(dim or None for dim in dims)))._to_xla_hlo_sharding(x.ndim) == wanted:
            return dims
    return [()] * x.ndim


def _assignments(counts: Sequence[int], sizes: dict[str, int]) -> Iterator[list[Axes]]:
    """All ways to divide dimensions into these numbers of parts."""
    if not counts:
        yield []
        return
    for number in range(len(sizes) + 1):
        for names in itertools.permutations(sizes, number):
            if math.prod(sizes[name] for name in names) == counts[0]:
                rest = {name: size for name, size in sizes.items() if name not in names}
                for dims in _assignments(counts[1:], rest):
                    yield [names, *dims]
