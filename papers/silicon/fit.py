"""Fits of the overheads of engines to measured runs."""

from collections.abc import Sequence as List

import numpy as np
from scipy.optimize import linprog

from papers.silicon.engines import Overheads, predict_all
from papers.silicon.runs import Run

PASSES = 2
LAYERS = 0.0, 0.3e-3, 0.45e-3, 0.6e-3  # seconds of the host for a layer that are tried


def fit_overheads(runs: List[Run], predictions: List[tuple[float, float]], start: Overheads) -> tuple[Overheads, float]:
    """Fit the overheads of one engine, but for those of a layer: those with the least mean relative error.

    Those of a step and of its sequences are added to each token, as every sequence that decodes has one token a step;
    a linear program finds them. That of the first token is then the median of what predictions lack, weighted by 1 /
    measured, which minimises the mean of |predicted / measured - 1|.

    Args:
      runs: of one engine, measured.
      predictions: their (TTFT, TPOT) in seconds, with the overheads `start`.
      start: the overheads of the predictions.

    Returns:
      (overheads of at least 0; the mean relative error of TPOT with them).
    """
    ttft, tpot = np.array(predictions).T
    measured_ttft, measured_tpot = np.array([(run.ttft, run.tpot) for run in runs]).T
    users = np.array([run.users for run in runs], float)
    # Of the variables, two are overheads, and the others bound what each run lacks from above and below.
    times, bounds = np.stack([np.ones(len(runs)), users], 1) / measured_tpot[:, None], np.eye(len(runs))
    lacking = (measured_tpot - tpot + start.step + users * start.sequence) / measured_tpot
    solved = linprog(
        np.r_[0.0, 0.0, np.ones(len(runs))],
        np.block([[times, -bounds], [-times, -bounds]]),
        np.r_[lacking, -lacking],
    )
    step, sequence = solved.x[:2].tolist()
    # A first token waits for about two steps: the one in which its request came, and its own.
    ttft = ttft + 2 * (step - start.step + users * (sequence - start.sequence))
    first = max(0.0, start.first_token + _weighted_median(measured_ttft - ttft, 1 / measured_ttft))
    return start._replace(step=step, sequence=sequence, first_token=first), solved.fun / len(runs)


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
