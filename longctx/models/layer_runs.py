"""Which layers are stacked together: runs of consecutive layers whose weights are stored alike.

A program scans over each run. With stages of a pipeline, all of which run one program, a run consists of the same
places in every stage.

Stages hold `ceil` or `floor` of `layers / stages` layers, the larger ones first. A smaller stage has a layer of zeros
in its first place. It adds zeros to its rows, so they leave it as they came. It costs no time, as stages step together,
and no memory that a device could use otherwise, as all have the same shapes. To skip it would cost time: a GPU waits
for the host where a branch, or the length of a loop, depends on what the device computes.
"""

from __future__ import annotations

import dataclasses
import functools

from longctx.models.config import LlamaConfig

Layer = int | None
"""Index of a layer; None: a layer of zeros."""


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


@functools.lru_cache(maxsize=64)
def layer_runs(config: LlamaConfig, stages: int = 1) -> tuple[Run, ...]:
    """The runs of a model whose layers are divided into `stages` consecutive parts."""
    parts = layers_of_stages(config.num_layers, stages)
    if config.quantization is None:
        return (Run(tuple(layer for part in parts for layer in part)),)
    quantized = [frozenset(names) for names in config.quantization.layers]
    runs: list[tuple[frozenset[str], frozenset[str], list[int]]] = []  # and places in a stage
    for place in range(len(parts[0])):
        there = [quantized[part[place]] for part in parts if part[place] is not None]  # type: ignore[index]
        always = frozenset.intersection(*there)
        partly = frozenset.union(*there) - always
        if runs and runs[-1][:2] == (always, partly):
            runs[-1][2].append(place)
        else:
            runs.append((always, partly, [place]))
    return tuple(
        Run(tuple(part[place] for part in parts for place in places), always, partly) for always, partly, places in runs
    )
