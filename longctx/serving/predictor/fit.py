"""Fits a predictor to measured batches."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import nnls

from longctx.serving.predictor.measured import Program, RuntimePredictor, kind_of
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work

Measurement = tuple[Work, float]
"""A batch, and its seconds."""


def fit(
    measured: Sequence[Measurement],
    buckets: Sequence[int],
    tiles: Sequence[int],
    window: int = 0,
    sliding_share: float = 0.0,
) -> RuntimePredictor:
    """Fit a program for each kind of batches that was measured, by least squared relative error.

    No coefficient is negative, so the predictor extrapolates.

    Args:
      measured: the work of the slowest rank of each batch, and the seconds, at least one batch for each bucket.
      buckets: numbers of rows of each kind that the engine's steps are compiled for, ascending.
      tiles: sizes of the tiles into which attention divides chunks, in tokens, ascending.
      window, sliding_share: as of `RuntimePredictor`.

    Raises:
      ValueError: a time is not positive and finite, a bucket has no batch, a batch has more rows than any bucket, or
        its exchange is missing.
    """
    if not buckets or not tiles:
        raise ValueError("buckets and tiles must not be empty")
    by_kind, found = dict[str, list[Measurement]](), set[int]()
    for work, seconds in measured:
        if not 0 < seconds < np.inf:
            raise ValueError(f"measured seconds must be positive and finite, got {seconds}")
        if work.rows > buckets[-1]:
            raise ValueError(f"measured has a batch of {work.rows} rows, more than the largest of buckets={buckets}")
        if work.sharded and not work.exchange:
            raise ValueError("measured must say the exchange of batches with sharded rows")
        by_kind.setdefault(kind_of(work), []).append((work, seconds))
        found |= {bisect_left(buckets, rows) for rows in (work.sharded, work.replicated, work.local) if rows}
    if missing := [rows for at, rows in enumerate(buckets) if at not in found]:
        raise ValueError(f"measured has no batch for the buckets of {missing} rows")
    # Few rows that are compiled alone are no more than a tile of as many.
    sizes = tuple(sorted({*tiles, *(rows for rows in buckets if rows < tiles[-1])}))
    programs, rows = [], tuple(buckets)
    for kind, batches in by_kind.items():
        # Seconds are linear in the coefficients: each counts as often as a program predicts that has it alone, as 1.
        ones = [Program.of(kind, rows, sizes, numbers) for numbers in np.eye(3 * len(rows) + len(sizes) + 5).tolist()]
        counted = np.array([[one.seconds(work, rows, window, sliding_share) for one in ones] for work, _ in batches])
        numbers = fit_non_negative(counted, np.array([seconds for _, seconds in batches]))
        programs.append(Program.of(kind, rows, sizes, numbers))
    return RuntimePredictor(rows, tuple(programs), window, sliding_share)


def fit_non_negative(features: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Fit seconds `[m]` by features `[m, n]` times non-negative coefficients `[n]`, by least squared relative error."""
    scale = features.max(axis=0)
    scale[scale == 0] = 1
    coefficients, _ = nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
    return (coefficients / scale).tolist()


def relative_errors(predictor: Predictor, measured: Iterable[Measurement]) -> np.ndarray:
    """Return predicted / measured - 1 of each batch, `[m]`."""
    return np.array([predictor.seconds(work) / seconds - 1 for work, seconds in measured])
