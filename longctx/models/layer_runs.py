"""Which layers are stacked together: runs of consecutive layers whose weights are stored alike, or each by itself.

A program scans over each run of several layers. With stages of a pipeline, all of which run one program, a run consists
of the same places in every stage. Where layers are apart, a run is one place: each device has one layer of it.

Stages hold `ceil` or `floor` of `layers / stages` layers, the larger ones first. A smaller stage has a layer of zeros
in its first place. It adds zeros to its rows, so they leave it as they came. It costs no time, as stages step together,
and no memory that a device could use otherwise, as all have the same shapes. To skip it would cost time: a GPU waits
for the host where a branch, or the length of a loop, depends on what the device computes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from longctx.models.config import LlamaConfig

Layer = int | None
"""Index of a layer; None: a layer of zeros."""


class Stacking(NamedTuple):
    """Rule by which layers are divided into runs.

    Attributes:
      stages: of a pipeline, 1 without one.
      apart: whether each place of a stage is a run of its own; else a run has all consecutive places that are stored
        alike.
    """

    stages: int = 1
    apart: bool = False


STACKED = Stacking()


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers that are stacked together.

    Attributes:
      layers: indices of the model's layers in the stack's order: those of the first stage, of the second and so on.
      quantized: names of the parameters that are quantised in all of these layers.
      partly: names of those that are quantised in the layers of some stages only.
    """

    layers: tuple[Layer, ...]
    quantized: frozenset[str] = frozenset()
    partly: frozenset[str] = frozenset()


def layers_per_stage(num_layers: int, stages: int) -> int:
    """Layers of the largest stage, which sets memory and time of all of them."""
    return -(-num_layers // stages)


def layers_of_stages(num_layers: int, stages: int) -> tuple[tuple[Layer, ...], ...]:
    """The layers in each place of each stage; `stages` at most `num_layers`."""
    each = layers_per_stage(num_layers, stages)
    smaller = stages * each - num_layers
    # Zeros are in the first place, so that the model's first and last layers, which are often not quantised, are in the
    # first and last places of their stages, with even stages and with uneven ones.
    parts, start = list[tuple[Layer, ...]](), 0
    for stage in range(stages):
        zeros = int(stage >= stages - smaller)
        parts.append((*(None,) * zeros, *range(start, start + each - zeros)))
        start += each - zeros
    return tuple(parts)


def sliding_places(config: LlamaConfig, stages: int = 1) -> np.ndarray:
    """Whether the layer in each place of each stage has the sliding window: bool `[stages, places]`.

    Layers of zeros have none. `stages` is at most the number of layers.
    """
    sliding = config.sliding_layers or (False,) * config.num_layers
    parts = layers_of_stages(config.num_layers, stages)
    return np.array([[layer is not None and sliding[layer] for layer in part] for part in parts], bool)


def most_full_layers(config: LlamaConfig, stages: int = 1) -> int:
    """Layers without a window of the stage that has most, which of stages with equally many layers takes longest."""
    return int(np.max(np.sum(~sliding_places(config, stages), 1)))


@functools.lru_cache(maxsize=64)
def layer_runs(config: LlamaConfig, stacking: Stacking = STACKED) -> tuple[Run, ...]:
    """The runs of a model whose layers are divided into `stacking.stages` consecutive parts."""
    parts = layers_of_stages(config.num_layers, stacking.stages)
    names_of_layers = config.quantization.layers if config.quantization is not None else ((),) * config.num_layers
    quantized = [frozenset(names) for names in names_of_layers]
    runs: list[tuple[frozenset[str], frozenset[str], list[int]]] = []  # and places in a stage
    for place in range(len(parts[0])):
        there = [quantized[part[place]] for part in parts if part[place] is not None]  # type: ignore[index]
        always = frozenset.intersection(*there)
        partly = frozenset.union(*there) - always
        if runs and runs[-1][:2] == (always, partly) and not stacking.apart:
            runs[-1][2].append(place)
        else:
            runs.append((always, partly, [place]))
    return tuple(
        Run(tuple(part[place] for part in parts for place in places), always, partly) for always, partly, places in runs
    )
