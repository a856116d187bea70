"""Which layers are stacked together: runs of consecutive layers whose weights are stored alike.

A program scans over each run. With stages of a pipeline, all of which run one program, a run consists of the same
places in every stage.
"""

from __future__ import annotations

import dataclasses
import functools

from longctx.models.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers that are stacked together.

    Attributes:
      layers: indices of the model's layers in the stack's order: those of the first stage, of the second and so on.
      quantized: names of the parameters that are quantised in all of these layers.
      partly: names of those that are quantised in the layers of some stages only.
    """

    layers: tuple[int, ...]
    quantized: frozenset[str] = frozenset()
    partly: frozenset[str] = frozenset()


def layers_per_stage(num_layers: int, stages: int) -> int:
    """Layers of the largest stage, which sets memory and time of all of them."""
    return -(-num_layers // stages)


@functools.lru_cache(maxsize=64)
def layer_runs(config: LlamaConfig, stages: int = 1) -> tuple[Run, ...]:
    """The runs of a model whose layers are divided into `stages` consecutive parts of one size."""
    if config.quantization is None:
        return (Run(tuple(range(config.num_layers))),)
    quantized = [frozenset(names) for names in config.quantization.layers]
    each = config.num_layers // stages
    runs: list[tuple[frozenset[str], frozenset[str], list[int]]] = []  # and places in a stage
    for place in range(each):
        there = [quantized[stage * each + place] for stage in range(stages)]
        always = frozenset.intersection(*there)
        partly = frozenset.union(*there) - always
        if runs and runs[-1][:2] == (always, partly):
            runs[-1][2].append(place)
        else:
            runs.append((always, partly, [place]))
    starts = [stage * each for stage in range(stages)]
    return tuple(
        Run(tuple(start + place for start in starts for place in places), always, partly)
        for always, partly, places in runs
    )
