"""`LayerRuns`: the parameters of layers in several stacks, or with layers of zeros among them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from longctx.models.layer_runs import Run


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stacks"], meta_fields=["stages"])
@dataclasses.dataclass(frozen=True)
class LayerRuns:
    """The layers of a model in stacks, a pytree for each run of layers that are stored alike (`layer_runs`).

    Attributes:
      stacks: in the order of the layers of a stage.
      stages: for how many stages of a pipeline they are stacked.
    """

    stacks: tuple[Any, ...]
    stages: int = 1


def by_run(runs: tuple[Run, ...], make: Callable[[Run], Any], stages: int = 1) -> Any:
    """`make(run)` of the only run, if it is the same for one stage; else the `LayerRuns` of all."""
    depends_on_stages = len(runs) > 1 or runs[0].partly or None in runs[0].layers
    return LayerRuns(tuple(map(make, runs)), stages) if depends_on_stages else make(runs[0])


def stacks_of(layers: Any) -> tuple[Any, ...]:
    """The stacks of `params["layers"]`, one for each run."""
    return layers.stacks if isinstance(layers, LayerRuns) else (layers,)


def stages_of(layers: Any) -> int:
    """For how many stages `params["layers"]` are stacked; 1 also where that makes no difference."""
    return layers.stages if isinstance(layers, LayerRuns) else 1
