"""Fits a predictor to measured batches."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import nnls

from longctx.serving.predictor.mesh import MeshPredictor, MeshProgram, features, kind_of
from longctx.serving.predictor.runtime import Predictor, Program, RuntimePredictor, keys_by_tile
from longctx.serving.predictor.work import Work

Measurement = tuple[Work, float]
"""A batch, and its seconds."""


def fit(measured: Sequence[Measurement], buckets: Sequence[int], tiles: Sequence[int]) -> RuntimePredictor:
    """Fit the predictor with the least squared relative error whose coefficients are all non-negative.

    Args:
      measured: batches and their seconds, at least one batch for each bucket.
      buckets: numbers of rows that the engine's steps are compiled for, ascending.
      tiles: sizes of the tiles into which attention divides chunks, in tokens, ascending. A bucket uses those that are
        no larger than itself.

    Raises:
      ValueError: a time is not positive and finite, a bucket has no batch, or a batch has more rows than any bucket.
    """
    if not buckets or not tiles:
        raise ValueError("buckets and tiles must not be empty")
    of_bucket: list[list[Measurement]] = [[] for _ in buckets]
    for work, seconds in measured:
        if not 0 < seconds < np.inf:
            raise ValueError(f"measured seconds must be positive and finite, got {seconds}")
        if work.rows > buckets[-1]:
            raise ValueError(f"measured has a batch of {work.rows} rows, more than the largest of buckets={buckets}")
        of_bucket[bisect_left(buckets, work.rows)].append((work, seconds))
    if missing := [rows for rows, batches in zip(buckets, of_bucket, strict=True) if not batches]:
        raise ValueError(f"measured has no batch for the buckets of {missing} rows")
    return RuntimePredictor(
        tuple(_fit_program(rows, batches, tiles) for rows, batches in zip(buckets, of_bucket, strict=True))
    )


def _fit_program(rows: int, measured: Sequence[Measurement], sizes: Sequence[int]) -> Program:
    largest = min(rows, sizes[-1])
    tiles = (*(size for size in sizes if size < largest), largest)
    seconds = np.array([time for _, time in measured])
    features = np.array([(1, *keys_by_tile(tiles, work), work.samples) for work, _ in measured], float)
    fixed, *per_key, per_sample = fit_non_negative(features, seconds)
    return Program(rows, fixed, tiles, tuple(per_key), per_sample)


def fit_mesh(measured: Sequence[Measurement], buckets: Sequence[int], tiles: Sequence[int]) -> MeshPredictor:
    """Fit the predictor of an engine over several context ranks likewise, a program for each kind that was measured.

    Args:
      measured: the work of the slowest rank of each batch, and the seconds.
      buckets: numbers of rows of each kind that steps are compiled for, ascending.
      tiles: as of `fit`.

    Raises:
      ValueError: a time is not positive and finite, a batch has more rows than any bucket, or its exchange is missing.
    """
    by_kind: dict[str, list[Measurement]] = {}
    for work, seconds in measured:
        if not 0 < seconds < np.inf:
            raise ValueError(f"measured seconds must be positive and finite, got {seconds}")
        if work.rows > buckets[-1]:
            raise ValueError(f"measured has a batch of {work.rows} rows, more than the largest of buckets={buckets}")
        if work.sharded and not work.exchange:
            raise ValueError("measured must say the exchange of batches with sharded rows")
        by_kind.setdefault(kind_of(work), []).append((work, seconds))
    programs = []
    for kind, batches in by_kind.items():
        counted = np.array([features(work, tuple(buckets), tuple(tiles)) for work, _ in batches], float)
        numbers = fit_non_negative(counted, np.array([seconds for _, seconds in batches]))
        programs.append(MeshProgram.of(kind, tuple(buckets), tuple(tiles), numbers))
    return MeshPredictor(tuple(buckets), tuple(programs))


def fit_non_negative(features: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Fit seconds `[m]` by features `[m, n]` times non-negative coefficients `[n]`, by least squared relative error."""
    scale = features.max(axis=0)
    scale[scale == 0] = 1
    coefficients, _ = nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
    return (coefficients / scale).tolist()


def relative_errors(predictor: Predictor, measured: Iterable[Measurement]) -> np.ndarray:
    """Return predicted / measured - 1 of each batch, `[m]`."""
    return np.array([predictor.seconds(work) / seconds - 1 for work, seconds in measured])
