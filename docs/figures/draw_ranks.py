"""Draw the Gantt chart of docs/scheduling.md, of ranks that step together, in virtual time.

`python docs/figures/draw_ranks.py`, with matplotlib.
"""

import argparse
import pathlib

import numpy as np
from matplotlib.figure import Figure

from longctx.models import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.plotting import drawing, save, style
from longctx.serving import EngineConfig, ParallelPlan, Slo, StepMetrics
from longctx.serving.predictor.roofline import roofline
from longctx.simulation import Instance, Simulation
from longctx.simulation.reports.plots import plot_ranks
from longctx.simulation.workloads import WorkloadRequest

LLAMA_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=2_000_000)
PLAN = ParallelPlan.medha(context=4, tensor=8, rank_tokens=1_000_000)
LONG, BUDGET, SECONDS = 1_000_000, 4096, 0.8


def run() -> list[StepMetrics]:
    """A prompt of a million tokens, and 10 requests a second of 2,000 to 30,000 tokens, which decode 100."""
    predictor = roofline(LLAMA_8B, Topology.preset("h100-rdma"), BUDGET, tensor=PLAN.tensor, context=PLAN.context)
    config = EngineConfig(
        page_size=256,
        num_pages=16_384,
        token_budget=BUDGET,
        prefix_cache=False,
        slo=Slo(tpot=0.1, step_seconds=0.1),
    )
    rng = np.random.default_rng(0)
    requests = [WorkloadRequest(0.0, LONG, 1)]
    for at in np.cumsum(rng.exponential(0.1, 200)).tolist():
        requests.append(WorkloadRequest(at, int(rng.integers(2_000, 30_000)), 100, number=len(requests)))
    steps = Simulation([Instance(LLAMA_8B, config, predictor, PLAN)]).run(requests).steps
    end = requests[-1].arrival / 2
    return [step for step in steps if end - SECONDS < step.finished < end]


def draw() -> Figure:
    figure, (axes,) = drawing(1, 9, 2.2)
    steps = run()
    plot_ranks(steps, axes)
    axes.set_title(f"Compute, and wait (grey), in steps of {1e3 * np.mean([step.seconds for step in steps]):.0f} ms")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    with style():
        save(draw(), args.directory / f"ranks.{args.format}")


if __name__ == "__main__":
    main()
