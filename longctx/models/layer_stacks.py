"""`LayerRuns`: the parameters of layers in several stacks, or with layers of zeros among them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from longctx.models.layer_runs import STACKED, Run, Stacking


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stacks"], meta_fields=["stacking"])
@dataclasses.dataclass(frozen=True)
class LayerRuns:
    """The layers of a model in stacks, a pytree for each run of layers that are stored alike (`layer_runs`).

    Attributes:
      stacks: in the order of the layers of a stage.
      stacking: for how many stages of a pipeline they are stacked, and whether each place of a stage is apart.
    """

    stacks: tuple[Any, ...]
    stacking: Stacking = STACKED


def by_run(runs: tuple[Run, ...], make: Callable[[Run], Any], stacking: Stacking = STACKED) -> Any:
    """`make(run)` of the only run, if it is the same for one stage; else the `LayerRuns` of all."""
    is_plain = len(runs) == 1 and not (stacking.apart or runs[0].partly or None in runs[0].layers)
    return make(runs[0]) if is_plain else LayerRuns(tuple(map(make, runs)), stacking)


def stacks_of(layers: Any) -> tuple[Any, ...]:
    """The stacks of `params["layers"]`, one for each run."""
    return layers.stacks if isinstance(layers, LayerRuns) else (layers,)


def stacking_of(layers: Any) -> Stacking:
    """Return how `params["layers"]` are stacked; for one stage also where stages make no difference."""
    return layers.stacking if isinstance(layers, LayerRuns) else STACKED


def of_one_stage(layers: Any) -> Any:
    """Inside `shard_map`: a stage's own part of `params["layers"]`, as those of a model without a pipeline."""
    if not isinstance(layers, LayerRuns):
        return layers
    return LayerRuns(layers.stacks, layers.stacking._replace(stages=1))


def in_order(layers: Any) -> Iterator[Any]:
    """Stacks of `params["layers"]` in the order of the model's layers, whose stages have parts of several stacks."""
    stacks, stages = stacks_of(layers), stacking_of(layers).stages
    if len(stacks) == 1 or stages == 1:
        yield from stacks
        return
    for stage in range(stages):
        for stack in stacks:
            yield jax.tree.map(lambda x: _by_stage(x, stages)[stage], stack)  # noqa: B023


def take_apart(layers: Any, stages: int = 1) -> LayerRuns:
    """Layers that are stacked for `stages` stages, each place of a stage as a stack of its own.

    It empties the stacks' dictionaries, one weight after another, so that memory holds one of them twice.
    """
    apart: list[dict[str, Any]] = []
    for stack in stacks_of(layers):
        places = next(iter(jax.tree.leaves(stack))).shape[0] // stages
        made: list[dict[str, Any]] = [{} for _ in range(places)]
        for name in [*stack]:
            leaves, structure = jax.tree.flatten(stack.pop(name))
            parts = [_split(x, stages) for x in leaves]
            for layer, own in zip(made, zip(*parts, strict=True), strict=True):
                layer[name] = jax.tree.unflatten(structure, own)
        apart += made
    return LayerRuns(tuple(apart), Stacking(stages, True))


def put_together(layers: LayerRuns) -> Any:
    """One stack of layers that are apart and stored alike, the opposite of `take_apart`."""

    def join(*parts: Any) -> Any:
        return jnp.stack(parts, 1).reshape(-1, *parts[0].shape[1:])

    return jax.tree.map(jax.jit(join), *layers.stacks)


def _split(x: Any, stages: int) -> list[Any]:
    """Each place of a stack `[stages * places, ...]`, `[stages, ...]`."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):  # views of numpy arrays
        return _places(x, stages)
    return _splitter(stages, x.sharding if isinstance(x.sharding, NamedSharding) else None)(x)


@functools.cache
def _splitter(stages: int, sharding: NamedSharding | None) -> Any:
    return jax.jit(functools.partial(_places, stages=stages), out_shardings=sharding)


def _places(x: Any, stages: int) -> list[Any]:
    by_stage = _by_stage(x, stages)
    return [by_stage[:, i] for i in range(by_stage.shape[1])]


def _by_stage(x: Any, stages: int) -> Any:
    return x.reshape(stages, -1, *x.shape[1:])
