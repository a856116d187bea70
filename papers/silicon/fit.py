"""Fits of the overheads of engines to measured runs."""

from collections.abc import Sequence as List

import numpy as np

from papers.silicon.engines import Overheads, predict_all
from papers.silicon.runs import Run

PASSES = 2
LAYERS = 0.0, 0.3e-3, 0.45e-3, 0.6e-3  # seconds of the host for a layer that are tried


def fit_overheads(runs: List[Run], predictions: List[tuple[float, float]], start: Overheads) -> tuple[Overheads, float]:
    """Fit the overheads of one engine, but for those of a layer: those with the least mean relative error.

    A step's overhead is added to each token, as every sequence that decodes has one token a step. It is the weighted
    median of what predictions lack, with weights of 1 / measured, which minimises the mean of |predicted / measured -
    1|; that of the first token likewise, after the step's own.

    Args:
      runs: of one engine, measured.
      predictions: their (TTFT, TPOT) in seconds, with the overheads `start`.
      start: the overheads of the predictions.

    Returns:
      (overheads of at least 0; the mean relative error of TPOT with them).
    """
    ttft, tpot = np.array(predictions).T
    measured_ttft, measured_tpot = np.array([(run.ttft, run.tpot) for run in runs]).T
    step = max(0.0, start.step + _weighted_median(measured_tpot - tpot, 1 / measured_tpot))
    # A first token waits for about two steps: the one in which its request came, and its own.
    ttft = ttft + 2 * (step - start.step)
    first = max(0.0, start.first_token + _weighted_median(measured_ttft - ttft, 1 / measured_ttft))
    error = np.abs((tpot + step - start.step) / measured_tpot - 1).mean()
    return start._replace(step=step, first_token=first), float(error)


def fit_engine(runs: List[Run], jobs: int, start: Overheads) -> Overheads:
    """Fit the overheads of an engine whose runs are simulated, in processes, with what each pass has found.

    Of `LAYERS`, that with the least error of TPOT is taken.
    """
    fits = []
    for layer in LAYERS:
        overheads, error = start._replace(layer=layer), 0.0
        for _ in range(PASSES):
            found = dict(predict_all(runs, overheads, jobs))
            overheads, error = fit_overheads(runs, [found[index] for index in range(len(runs))], overheads)
        fits.append((error, overheads))
    return min(fits)[1]


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2)])
