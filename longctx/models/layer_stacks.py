"""`LayerRuns`: the parameters of layers in several stacks, one for each run of layers that are stored alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from longctx.models.layer_runs import Run


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stacks"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayerRuns:
    """The layers of a model in several stacks, a pytree for each run, in the order of the layers of a stage."""

    stacks: tuple[Any, ...]


def by_run(runs: tuple[Run, ...], make: Callable[[Run], Any]) -> Any:
    """`make(run)` of the only run, or the `LayerRuns` of all."""
    return make(runs[0]) if len(runs) == 1 else LayerRuns(tuple(map(make, runs)))


def stacks_of(layers: Any) -> tuple[Any, ...]:
    """The stacks of `params["layers"]`, one for each run."""
    return layers.stacks if isinstance(layers, LayerRuns) else (layers,)
