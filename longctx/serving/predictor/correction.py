"""A predictor that is put right by what it is told of batches that have run."""

import math
from collections import deque
from collections.abc import Iterable

from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work

_MEMORY, _ENOUGH = 32, 8  # batches


class Corrected:
    """A predictor times one factor: the median of measured against predicted over the last batches, weighted by time.

    From the eighth batch on. A median, so that a compilation or another process does not count; by time, because long
    steps are what it is asked about. The same reports in the same order give the same predictions.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.factor = predictor, 1.0
        self._seen: deque[tuple[float, float]] = deque(maxlen=_MEMORY)  # measured / predicted, and predicted

    def seconds(self, work: Work) -> float:
        return self.factor * self.predictor.seconds(work)

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        return self.factor * self.predictor.prefill_seconds(start, stop, chunk)

    def observe(self, work: Work, seconds: float) -> None:
        """A batch took that long."""
        predicted = self.predictor.seconds(work)
        if predicted > 0 and 0 < seconds < math.inf:
            self._seen.append((seconds / predicted, predicted))
            if len(self._seen) >= _ENOUGH:
                self.factor = _weighted_median(self._seen)


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The least value that, with those below it, has half of the weight."""
    ascending = sorted(values)
    half, below = sum(weight for _, weight in ascending) / 2, 0.0
    for value, weight in ascending:
        below += weight
        if below >= half:
            return value
    raise ValueError("values must not be empty")
