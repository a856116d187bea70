"""`Corrected`: a predictor that is corrected by the measured times of batches."""

import math
from collections import deque
from collections.abc import Iterable

from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work

_WINDOW, _LEAST = 32, 8  # batches that count, and how many it takes to correct


class Corrected:
    """A predictor times a factor: the median of measured over predicted seconds of the last batches, weighted by time.

    The factor is 1 before the eighth batch. The median ignores outliers, such as a compilation or a busy machine, and
    the weights favour long steps, whose predictions matter most. The same observations in the same order give the same
    predictions.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.factor = predictor, 1.0
        self._seen: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # measured / predicted, and predicted

    def seconds(self, work: Work) -> float:
        return self.factor * self.predictor.seconds(work)

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        return self.factor * self.predictor.prefill_seconds(start, stop, chunk)

    def observe(self, work: Work, seconds: float) -> None:
        """Add the measured time of a batch."""
        predicted = self.predictor.seconds(work)
        if predicted > 0 and 0 < seconds < math.inf:
            self._seen.append((seconds / predicted, predicted))
            if len(self._seen) >= _LEAST:
                self.factor = _weighted_median(self._seen)


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The smallest value such that it and those below it have half of the weight; values are (value, weight)."""
    ascending = sorted(values)
    half, below = sum(weight for _, weight in ascending) / 2, 0.0
    for value, weight in ascending:
        below += weight
        if below >= half:
            return value
    raise ValueError("values must not be empty")
