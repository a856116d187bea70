"""A predictor that is put right by what it is told of batches that have run."""

import math
from collections import deque
from statistics import median

from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work

_MEMORY = 32  # batches


class Corrected:
    """A predictor times one factor: the median of measured against predicted over the last batches.

    A median, so that a compilation or another process does not count. The same reports in the same order give the same
    predictions.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.factor = predictor, 1.0
        self._ratios: deque[float] = deque(maxlen=_MEMORY)

    def seconds(self, work: Work) -> float:
        return self.factor * self.predictor.seconds(work)

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        return self.factor * self.predictor.prefill_seconds(start, stop, chunk)

    def observe(self, work: Work, seconds: float) -> None:
        """A batch took that long."""
        predicted = self.predictor.seconds(work)
        if predicted > 0 and 0 < seconds < math.inf:
            self._ratios.append(seconds / predicted)
            self.factor = median(self._ratios)
