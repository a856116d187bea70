"""How fast a device was at every moment: what is predicted of it, stretched by what was measured."""

from collections.abc import Iterable

import numpy as np


class DeviceSpeed:
    """The speed of a device over time, relative to what is predicted of it.

    Within a step that was measured, it does what is predicted of the step in the time that the step took; between steps
    it is as fast as predicted. So a simulation with other batches than those measured meets the same slow moments.

    Args:
      steps: that followed each other: when each began and ended, by one clock, and its predicted seconds.
    """

    def __init__(self, steps: Iterable[tuple[float, float, float]]) -> None:
        real, done = [0.0], [0.0]
        for begin, end, predicted in steps:
            begin = max(begin, real[-1])
            done.append(done[-1] + begin - real[-1])
            done.append(done[-1] + predicted)
            real += [begin, max(end, begin)]
        self._real, self._done = np.array(real), np.array(done)

    def seconds(self, start: float, predicted: float) -> float:
        """How long takes what begins at `start` and is predicted to take so many seconds."""
        done = _interpolate(start, self._real, self._done) + predicted
        return max(0.0, _interpolate(done, self._done, self._real) - start)


def _interpolate(at: float, x: np.ndarray, y: np.ndarray) -> float:
    """Beyond the last point with slope 1."""
    return float(np.interp(at, x, y)) + max(0.0, at - float(x[-1]))
