"""Runs behind Medha's figures: its mixes on each system, for a window of an hour as in the paper."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from longctx.parallel import Topology
from longctx.serving import ParallelPlan
from longctx.serving.predictor import Work
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, make_mix, read_workload, scale_lengths
from papers.baselines import make_simulation
from papers.figures.figure import Inputs

WINDOW = 3600.0  # seconds (Medha, 5.2: "60-minute profiling window")
RATES = (0.25, 0.75, 1.25, 1.75)  # requests a second, those of figures 15 to 18
LONG = 100_000  # tokens of a prompt that counts as long
CHUNK = 4096  # tokens, the largest of Medha's adaptive chunks
QUICK = 4.0  # seconds of a window in tests

# The mixes of the paper in the data folder, and the built-in ones that stand for them.
_FILES = {
    "short": ("mixes/merged_df_0_percent_long_context_mixed.csv", "sharegpt4"),
    "long": ("mixes/merged_df_5_percent_long_context_mixed.csv", "sharegpt4-5-long"),
}


@dataclass(frozen=True)
class Outcome:
    """Results of the requests of a window, in the order of their arrival; all arrays are `[requests]`.

    Attributes:
      system: name of the baseline.
      window: seconds.
      arrival, prompt, output: seconds and tokens of each request.
      admitted, first, finished: seconds from the beginning to when it had memory, to its first and to its last token;
        infinite: not in the window.
      tpot: seconds a token of those that ended with two tokens or more; NaN of others.
    """

    system: str
    window: float
    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    admitted: np.ndarray
    first: np.ndarray
    finished: np.ndarray
    tpot: np.ndarray

    @property
    def ttft(self) -> np.ndarray:
        """Seconds to the first token; infinite: it did not come in the window."""
        return self.first - self.arrival

    @property
    def is_long(self) -> np.ndarray:
        return self.prompt >= LONG

    @property
    def waited(self) -> np.ndarray:
        """Seconds to the first token; of those that have none in the window, how long they had waited when it closed.

        So its quantiles are at most those of TTFT.
        """
        return np.where(np.isfinite(self.first), self.ttft, self.window - self.arrival)

    def quantile(self, share: float) -> float:
        """A quantile of `waited`, over all requests that came."""
        return float(np.quantile(self.waited, share))

    def tpot_quantile(self, share: float) -> float:
        """A quantile of TPOT, over requests that ended in the window; 0 if there is none."""
        known = self.tpot[np.isfinite(self.tpot)]
        return float(np.quantile(known, share)) if len(known) else 0.0

    @property
    def served_share(self) -> float:
        """Share of the requests that got a first token in the window."""
        return float(np.isfinite(self.first).mean())

    @property
    def long_ended(self) -> int:
        """Long prompts that were read in the window."""
        return int(np.isfinite(self.first[self.is_long]).sum())

    def active(self, times: np.ndarray) -> np.ndarray:
        """Requests that had come and not ended, at some times; `[times]`."""
        came = np.searchsorted(np.sort(self.arrival), times, side="right")
        return came - np.searchsorted(np.sort(self.finished), times, side="right")


def requests(inputs: Inputs, mix: str, rate: float, window: float, scale: float = 1.0) -> list[WorkloadRequest]:
    """The requests that come in a window, as a Poisson process; the same ones for every system.

    Args:
      mix: "short", or "long" with 5 % of prompts between 100,000 and a million tokens.
      scale: by which the lengths of long prompts are multiplied.
    """
    name, builtin = _FILES[mix]
    count, file = int(2 * rate * window) + 50, inputs.file(name)
    found = make_mix(builtin, count, inputs.seed) if file is None else read_workload(file, count)
    if inputs.quick:
        found = [x if x.prompt_tokens < LONG else scale_lengths([x], 0.1)[0] for x in found]
    elif scale != 1:
        found = [x if x.prompt_tokens < LONG else scale_lengths([x], scale)[0] for x in found]
    return [x for x in arrive_at_rate(found, rate, inputs.seed) if x.arrival < window]


@functools.cache
def serve(inputs: Inputs, system: str, mix: str, rate: float, window: float) -> Outcome:
    """Llama-3 8B on the two DGX-A100 (16 GPUs) of the paper's capacity evaluation (5.2)."""
    window = QUICK if inputs.quick else window
    return run(system, "llama-3-8b", "medha-a100", 16, requests(inputs, mix, rate, window), window)


def run(
    system: str,
    model: str,
    topology: str,
    devices: int,
    workload: list[WorkloadRequest],
    window: float,
    plan: ParallelPlan | None = None,
    **overrides: Any,
) -> Outcome:
    """Serve a workload for a window, without a prefix cache: no two of its prompts share anything."""
    overrides = {"prefix_cache": False} | overrides
    simulation = make_simulation(system, MODELS[model], Topology.preset(topology), devices, plan, **overrides)
    record = simulation.run(workload, until=window, keep_steps=False)
    admitted, first, finished, tpot = (dict[int, float]() for _ in range(4))
    came = [(x.number, x.due, x.metrics) for x in record.served] + [(x.number, x.due, x.metrics) for x in record.open]
    for number, due, metrics in came:
        if metrics.admitted is not None:
            admitted[number] = due + metrics.admitted - metrics.arrival
    for served in record.served:
        assert served.metrics.finished is not None
        first[served.number] = served.due + served.ttft
        finished[served.number] = served.due + served.metrics.finished - served.metrics.arrival
        tpot[served.number] = float("nan") if served.tpot is None else served.tpot
    first |= {x.number: x.due + x.ttft for x in record.open if x.ttft is not None}

    def column(values: dict[int, float], missing: float) -> np.ndarray:
        return np.array([values.get(request.number, missing) for request in workload])

    arrival = np.array([request.arrival for request in workload])
    prompt = np.array([request.prompt_tokens for request in workload])
    output = np.array([request.output_tokens for request in workload])
    found = column(admitted, np.inf), column(first, np.inf), column(finished, np.inf), column(tpot, np.nan)
    return Outcome(system, window, arrival, prompt, output, *found)


def alone(prompts: np.ndarray) -> np.ndarray:
    """Predict the TTFT of prompts alone on the 16 A100, in chunks of 4,096 tokens; `[prompts]`, seconds.

    A tick of the pipeline takes as long as the slower of the chunks in its two stages.
    """
    plan = ParallelPlan.medha(stage=2, tensor=8)
    device = predictor(MODELS["llama-3-8b"], "medha-a100", plan)
    whole = [device.seconds(Work().with_chunk(at, CHUNK, False)) for at in range(0, int(prompts.max()), CHUNK)]
    full = np.concatenate([[0.0], np.cumsum(whole)])
    found = []
    for tokens in map(int, prompts):
        count, rest = divmod(tokens - 1, CHUNK)
        last = device.seconds(Work().with_chunk(tokens - 1 - rest, rest + 1, True))
        # Chunks take longer one after the other: the last but one is in the second stage beside the last.
        ticks = max(last, whole[count - 1]) if count else last
        found.append(full[count] + ticks + last)
    return np.array(found)


def full_rate(inputs: Inputs) -> float:
    """Requests a second, 5 % of them long, that the 16 A100 can read in chunks of 4,096 if they do nothing else."""
    prompts = [x.prompt_tokens for x in requests(inputs, "long", RATES[-1], WINDOW)]
    return float(1 / alone(np.array(prompts)).mean())


def draw_cdf(axes: Any, values: np.ndarray, label: str) -> None:
    """Draw the share of values up to each."""
    values = np.sort(values)
    axes.plot(values, np.arange(1, len(values) + 1) / len(values), label=label)
