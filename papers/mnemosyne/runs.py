"""Mnemosyne's setting: hosts of 8 H100, a long prompt, and short requests that decode beside it.

The core that serves runs in virtual time. Source: Mnemosyne, 6.1.
"""

import dataclasses
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from longctx.models import LlamaConfig
from longctx.parallel import Topology
from longctx.serving import EngineConfig, ParallelPlan, Slo, StepMetrics
from longctx.serving.predictor import CurvePredictor
from longctx.simulation import Instance, Simulation, Totals
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.utilization import device_memory
from longctx.simulation.workloads import WorkloadRequest
from papers.figures.figure import Inputs

TOPOLOGY = Topology.preset("mnemosyne-h100")
DEVICE = TOPOLOGY.device
TPOT_TARGET = 0.03  # seconds; Mnemosyne, 6.3
CHUNK = 4096  # tokens; 6.2
SHORT = 1000  # tokens of a short request's prompt (figure 22)
PAGE = 1024  # tokens
M = 1_000_000
B8, B70 = MODELS["llama-3-8b"], MODELS["llama-3-70b"]
MODELS_BY_NAME = {"8B": B8, "70B": B70}
HOST = ParallelPlan.medha(tensor=8)
_SHRINK = 64  # by which quick figures have shorter prompts

Row = dict[str, Any]


def tokens(inputs: Inputs, millions: float) -> int:
    """Tokens of a long prompt; fewer where it has to be quick."""
    return round(millions * M) // (_SHRINK if inputs.quick else 1)


def predict(model: LlamaConfig, plan: ParallelPlan, rows: int = CHUNK) -> CurvePredictor:
    """The one cost model, for a plan on Mnemosyne's hosts."""
    return predictor(model, TOPOLOGY, plan, max_rows=rows)


def fits(model: LlamaConfig, plan: ParallelPlan, millions: float) -> bool:
    """Check whether weights, keys and values of `millions` million tokens fit into a plan's devices."""
    return device_memory(model, plan, DEVICE, round(millions * M), CHUNK).fits


def static(rows: int, target: float | None = None) -> EngineConfig:
    """As many rows in every step, decodes among them, first come first served.

    Args:
      target: seconds between tokens; a request grows onto another rank so that it is kept.
    """
    return EngineConfig.sarathi(rows, slo=Slo(tpot=target, tpot_factor=1.0, step_seconds=None), max_running=1)


def adaptive(target: float) -> EngineConfig:
    """Chunks as large as a target of seconds between tokens allows."""
    return EngineConfig.medha(slo=Slo(tpot=target, tpot_factor=1.0, step_seconds=target))


@dataclasses.dataclass(frozen=True)
class Run:
    """Results of a long prompt.

    Attributes:
      ttft, tpot: seconds of the long request. tpot is None if it had one token of output.
      steps: of the engine while the long prompt was computed; chunks: tokens of the prompt in each.
      totals: what was computed from the beginning to the end, short requests' prompts and decodes too.
    """

    ttft: float
    tpot: float | None
    steps: List[StepMetrics]
    chunks: List[int]
    totals: Totals

    def gap(self, share: float) -> float:
        """Seconds between tokens of short requests that such a share of them does not exceed."""
        return float(np.quantile([gap for step in self.steps for gap in step.gaps], share))

    @property
    def longest_step(self) -> float:
        return max(step.seconds for step in self.steps)


def ranks_of(step: StepMetrics) -> int:
    """Context ranks that computed something in a step."""
    return max(1, sum(seconds > 0 for seconds in step.rank_seconds))


def serve(
    model: LlamaConfig,
    plan: ParallelPlan,
    config: EngineConfig,
    prompt: int,
    outputs: int = 1,
    short: int = 0,
    memory: int | None = None,
) -> Run:
    """Serve a prompt of `prompt` tokens.

    Args:
      outputs: tokens that are generated after it.
      short: requests that decode all the while: their prompts have been computed when the long one comes.
      memory: tokens that a rank has room for; None: all that there are.
    """
    arrival = 0.05 * short
    # They must not run out of tokens meanwhile: adaptive chunks have at least 32 tokens in these figures, and a step
    # takes at least a millisecond.
    chunk = 32 if config.chunking == "adaptive" else config.token_budget - short
    decoded = prompt // chunk + round(arrival / 1e-3) + 64
    pages = -(-(prompt + outputs) // PAGE) + short * (-(-(SHORT + decoded) // PAGE) + 1) + 2
    config = dataclasses.replace(
        config,
        page_size=PAGE,
        num_pages=pages if memory is None else -(-memory // PAGE),
        max_running=short + 1,
        prefix_cache=False,
        run_ahead=1,
    )
    instance = Instance(model, config, predict(model, plan, config.token_budget), plan, topology=TOPOLOGY)
    requests = [WorkloadRequest(0.0, SHORT, decoded, number=number) for number in range(short)]
    record = Simulation([instance]).run([*requests, WorkloadRequest(arrival, prompt, outputs, number=short)])
    long = next(served for served in record.served if served.number == short)
    name, steps, chunks = f"request-{short}", [], []
    for step in record.steps:
        rows = sum(count for request, count, decodes in step.rows if request == name and not decodes)
        if rows:
            steps.append(step)
            chunks.append(rows)
    return Run(long.ttft, long.tpot, steps, chunks, record.totals)


def doubling(axes: Any, values: List[int]) -> None:
    """An axis of numbers that double, each of which is named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])


def named(axes: Any, values: List[float], unit: float = 1) -> None:
    """Name these numbers on the x axis, in units of `unit`, and no others."""
    axes.set_xticks([unit * value for value in values], [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)


def lines(axes: Any, table: List[Row], x: str, y: str, by: str, label: str = "{}", marker: str = "o-") -> None:
    """Draw column `y` over column `x`, a line for each value of column `by`; rows without `y` are left out."""
    drawn = [row for row in table if row.get(y) is not None]
    for value in dict.fromkeys(row[by] for row in drawn):
        rows = [row for row in drawn if row[by] == value]
        axes.plot([row[x] for row in rows], [row[y] for row in rows], marker, label=label.format(value))
    axes.legend()
