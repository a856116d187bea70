"""`Corrected`: a predictor that is corrected by the measured times of batches."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

from longctx.serving.predictor.runtime import Predictor, curves_of, window_of
from longctx.serving.predictor.work import Work

_WINDOW, _LEAST = 32, 8  # batches that count, and how many it takes to correct
_DIGITS = 6  # of a ratio that count: what is equal but for the rounding of clocks is predicted alike


class Corrected:
    """A predictor times a factor for each kind of batch: decodes alone, and batches with chunks of prompts.

    The kinds are corrected apart, as the host's work and reading the weights dominate the one, and products the other.
    A factor is the median of measured over predicted seconds of the last batches of its kind, weighted by time; before
    the eighth of them, of the last batches of both kinds, and before the eighth of those it is 1. The median ignores
    outliers, such as a compilation or a busy machine, and the weights favour long steps, whose predictions matter most.
    The same observations in the same order give the same predictions.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.decode_factor, self.prompt_factor = predictor, 1.0, 1.0
        self._curve = curves_of(predictor)
        self._decodes, self._prompts, self._all = _Window(), _Window(), _Window()

    @property
    def window(self) -> int:
        """Tokens of a sliding layer's window; 0: there are none."""
        return window_of(self.predictor)

    def seconds(self, work: Work) -> float:
        """Seconds of a batch, as `Predictor.seconds`."""
        return (self.prompt_factor if work.chunks else self.decode_factor) * self.predictor.seconds(work)

    def chunk_curve(self, work: Work, start: int) -> Callable[[int], float]:
        """The seconds of a batch with one more local chunk, as a function of the chunk's tokens."""
        seconds, prompts = self._curve(work, start), self.prompt_factor
        alone = prompts if work.chunks else self.decode_factor  # of a chunk of one token
        if prompts == alone == 1.0:
            return seconds
        return lambda count: (prompts if count > 1 else alone) * seconds(count)

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        """Seconds of prefilling a prompt alone, as `Predictor.prefill_seconds`."""
        return self.prompt_factor * self.predictor.prefill_seconds(start, stop, chunk)

    def observe(self, work: Work, seconds: float) -> None:
        """Add the measured seconds of a batch."""
        predicted = self.predictor.seconds(work)
        if predicted > 0 and 0 < seconds < math.inf:
            ratio = round(seconds / predicted, _DIGITS)
            for window in (self._all, self._prompts if work.chunks else self._decodes):
                window.add(ratio, predicted)
            self._correct()

    @property
    def is_confirmed(self) -> bool:
        """Whether all batches that count took just what was predicted, so that nothing is corrected."""
        windows = (self._decodes, self._prompts, self._all)
        return self.decode_factor == self.prompt_factor == 1.0 and all(window.is_all(1.0) for window in windows)

    def confirm(self, predicted: List[float], has_prompts: List[bool] = ()) -> None:
        """As if batches had taken the seconds that were predicted, where all before them did.

        Args:
          predicted: seconds of each.
          has_prompts: whether each has chunks of prompts; empty: none has.
        """
        prompts = [seconds for seconds, has in zip(predicted, has_prompts, strict=False) if has]
        decodes = [s for s, has in zip(predicted, has_prompts, strict=True) if not has] if has_prompts else predicted
        for window, seconds in ((self._all, predicted), (self._prompts, prompts), (self._decodes, decodes)):
            window.add_alike(1.0, seconds)

    def _correct(self) -> None:
        of_all = self._all.median(1.0)
        self.decode_factor, self.prompt_factor = self._decodes.median(of_all), self._prompts.median(of_all)


class _Window:
    """The last batches, each as measured over predicted seconds and its weight."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._alike = 0  # how many of the last ratios are equal

    def add(self, ratio: float, weight: float) -> None:
        self._alike = self._alike + 1 if self._seen and self._seen[-1][0] == ratio else 1
        self._seen.append((ratio, weight))

    def add_alike(self, ratio: float, weights: List[float]) -> None:
        """Add batches of one ratio, which is that of all before them."""
        self._alike += len(weights)
        self._seen.extend([(ratio, weight) for weight in weights[-_WINDOW:]])

    def is_all(self, ratio: float) -> bool:
        """Whether all ratios are this one."""
        return not self._seen or (self._alike >= len(self._seen) and self._seen[-1][0] == ratio)

    def median(self, default: float) -> float:
        """The weighted median; `default` while there are too few batches."""
        if len(self._seen) < _LEAST:
            return default
        return self._seen[-1][0] if self._alike >= len(self._seen) else _weighted_median(self._seen)


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The smallest value such that it and those below it have half of the weight; values are (value, weight)."""
    ascending = sorted(values)
    half, below = sum(weight for _, weight in ascending) / 2, 0.0
    for value, weight in ascending:
        below += weight
        if below >= half:
            return value
    raise ValueError("values must not be empty")
