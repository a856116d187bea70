"""The measured engines in simulated time: their schedulers, and what their hosts take."""

import dataclasses
import functools
import multiprocessing
import statistics
from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import Any, NamedTuple

import numpy as np

from longctx.parallel import Topology
from longctx.serving.predictor import CurvePredictor
from longctx.simulation import HostTimes, Record
from longctx.simulation.baselines import make_simulation
from longctx.simulation.hardware import predictor
from longctx.simulation.workloads import Lengths, WorkloadRequest, closed_loop, synthesize
from papers.silicon.runs import Run

ROUNDS = 10  # requests of a user
FRONT_END = 0.002  # seconds of the front end for each request, one after the other
MAX_RUNNING = 256
CAPTURED = 256  # rows of the largest CUDA graph


class Overheads(NamedTuple):
    """Overheads of an engine and its host, in seconds, fitted on one half of the runs.

    Attributes:
      step: of each step, beside what is predicted of the devices.
      first_token: between client and engine, of a request's first token.
      layer: that the host takes to start the kernels of a layer in a step with more rows than are captured in a CUDA
        graph. The devices take longer for many rows, and hide it; else the step takes as long.
      sequence: of each sequence that has a token in a step, which the host samples, detokenizes and sends on.
    """

    step: float
    first_token: float
    layer: float = 0.0
    sequence: float = 0.0


class Engine(NamedTuple):
    """An engine as it was measured.

    Attributes:
      baseline: its scheduler, a name of `longctx.simulation.baselines.BASELINES`.
      one_prompt: whether a step has rows for one prompt and a decode of each user, as AIConfigurator sets the token
        budget by default (`ctx_tokens` is the prompt's length); else the engine's default of 8,192.
      overheads: of its host.
      lacking: slots fewer than users, one of whom always waits then. That is inferred from TTFT, which for few users
        grows with the length of outputs by what an output takes, over the users.
    """

    baseline: str
    one_prompt: bool
    overheads: Overheads
    lacking: int = 0


ENGINES = {
    "vllm": Engine("vllm-mixed", True, Overheads(0.0012, 0.020, 0.0, 46e-6)),
    "sglang": Engine("sglang", False, Overheads(0.0, 0.134, 0.0, 24e-6)),
    "trtllm": Engine("trtllm", True, Overheads(0.0, 0.024, 0.0006, 8e-6)),
    "trtllm, Llama": Engine("trtllm", True, Overheads(0.0006, 0.0, 0.0006, 2e-6), lacking=1),
}
"""By name of the engine, with the family of models after it where these runs differ from its others."""


def engine_name(run: Run) -> str:
    """Name in `ENGINES` of the engine of a run."""
    of_family = f"{run.engine}, {run.model.rpartition('/')[2].partition('-')[0]}"
    return of_family if of_family in ENGINES else run.engine


def make_workload(run: Run, shortest: float = 1.0, seed: int = 0) -> list[WorkloadRequest]:
    """Make the requests of a run: ten for each user, who sends the next one when the one before has ended.

    Args:
      run: whose lengths and users count.
      shortest: of the nominal length of prompts, the share that the shortest has; lengths are uniform from there. 1:
        all are equal, with which the measured times are met best. Outputs are equally long.
      seed: of the lengths.
    """
    prompts = Lengths(int(shortest * run.prompt_tokens), run.prompt_tokens)
    outputs = Lengths(run.output_tokens, run.output_tokens)
    return closed_loop(synthesize(ROUNDS * run.users, prompts, outputs, seed=seed), run.users)


def simulate(run: Run, overheads: Overheads | None = None) -> Record:
    """Serve a run's requests in simulated time.

    Args:
      run: what is served, and on which devices.
      overheads: of the engine's host; None: the fitted ones. That of the first token is not part of the record.

    Raises:
      ValueError: the model doesn't fit into the devices.
    """
    engine, topology = ENGINES[engine_name(run)], Topology.preset("h100-nvlink")
    overheads = overheads or engine.overheads
    most = MAX_RUNNING if not engine.lacking else max(1, run.users - engine.lacking)
    device = dataclasses.replace(topology.device, step_seconds=topology.device.step_seconds + overheads.step)
    budget = run.prompt_tokens + run.users if engine.one_prompt else 8192
    simulation = make_simulation(
        engine.baseline,
        run.config,
        dataclasses.replace(topology, device=device),
        run.tensor,
        host=HostTimes(front_end=FRONT_END),
        predict=functools.partial(_predict_steps, overheads.layer * run.config.num_layers, overheads.sequence),
        prefix_cache=False,
        run_ahead=2,
        token_budget=budget,
        max_running=min(most, budget),
        kv_dtype="float8_e4m3fn" if run.fp8_cache else None,
    )
    return simulation.run(make_workload(run), until=1e6, keep_steps=False)


def _predict_steps(least: float, sequence: float, *arguments: Any, **options: Any) -> CurvePredictor:
    """The predictor of a system whose steps of more than `CAPTURED` rows take `least` seconds at least.

    Each token of a step takes `sequence` seconds more.
    """
    predicted = predictor(*arguments, **options)
    knots = sorted({*predicted.rows, CAPTURED, CAPTURED + 1})
    linear = np.interp(knots, predicted.rows, predicted.linear)
    linear[np.array(knots) > CAPTURED] = np.maximum(linear[np.array(knots) > CAPTURED], least)
    per_sample = predicted.per_sample + sequence
    return dataclasses.replace(predicted, rows=tuple(knots), linear=tuple(linear.tolist()), per_sample=per_sample)


def predict(run: Run, overheads: Overheads | None = None) -> tuple[float, float]:
    """Predict the mean TTFT and mean TPOT of a run, in seconds.

    Args:
      run, overheads: as for `simulate`.
    """
    overheads = overheads or ENGINES[engine_name(run)].overheads
    served = simulate(run, overheads).served
    tpots = [each.tpot for each in served if each.tpot is not None]
    return statistics.fmean(each.ttft for each in served) + overheads.first_token, statistics.fmean(tpots)


def predict_all(
    runs: List[Run], overheads: Overheads | None = None, jobs: int = 1
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Predict runs in processes: yield (index of the run, its (TTFT, TPOT) in seconds) as these come.

    Args:
      runs, overheads: as for `simulate`.
      jobs: processes.
    """
    tasks = [(index, run, overheads) for index, run in enumerate(runs)]
    if jobs == 1:
        yield from map(_predict_task, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_predict_task, tasks)


def _predict_task(task: tuple[int, Run, Overheads | None]) -> tuple[int, tuple[float, float]]:
    index, run, overheads = task
    return index, predict(run, overheads)
