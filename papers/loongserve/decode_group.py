"""Requests that decode together, many steps as one event."""

import dataclasses
import math
from collections.abc import Callable

from longctx.serving import Metrics
from longctx.simulation import EventLoop
from longctx.simulation.workloads import WorkloadRequest


@dataclasses.dataclass(eq=False)
class Active:
    """A request that is served: the tokens of its context, and those that it is yet to generate."""

    request: WorkloadRequest
    metrics: Metrics
    context: int
    left: int


class DecodeGroup:
    """Decodes on one or several instances: every step has one token of each.

    The seconds of a step are taken to be linear in its keys, so the steps until the next request ends are one event.
    Requests come and go between two steps.

    Args:
      seconds: of a step with given rows and keys, on all instances together.
      on_steps: is told how many steps have ended, with how many rows, the keys of all of them, and their seconds.
      on_end: is told of each request that has all its tokens.
      on_change: is told when requests have come or gone, and the next step has begun if there is one.

    Attributes:
      active: requests that decode.
      promised: tokens for which room is kept, of requests that are on their way here.
    """

    def __init__(
        self,
        loop: EventLoop,
        seconds: Callable[[int, int], float],
        on_steps: Callable[[int, int, int, float], object],
        on_end: Callable[[Active], object],
        on_change: Callable[["DecodeGroup"], object],
    ) -> None:
        self._loop, self._seconds = loop, seconds
        self._on_steps, self._on_end, self._on_change = on_steps, on_end, on_change
        self.active: list[Active] = []
        self.promised = 0
        self._version = 0
        self._begun, self._steps, self._first, self._slope = 0.0, 0, 0.0, 0.0
        self._changes: list[Callable[[], object]] = []

    @property
    def tokens(self) -> int:
        """Tokens for which it needs room, those that are yet to be generated among them."""
        return self.promised + sum(each.context + each.left for each in self.active)

    def change(self, action: Callable[[], object]) -> float:
        """Run an action between two steps, which may add to `active` and take from it. Returns when."""
        when, steps = self._boundary(self._loop.now)
        self._changes.append(action)
        if len(self._changes) == 1:
            self._version += 1
            self._plan(when, steps)
        return when

    def _boundary(self, now: float) -> tuple[float, int]:
        """Return when the step that runs now ends, and the steps that have ended then."""
        if not self._steps:
            return now, 0
        if self._changes:
            return self._stop, self._stop_steps
        low, high = 0, self._steps  # the least number of steps that end at `now` or later
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._begun + self._took(middle) >= now else (middle + 1, high)
        return max(now, self._begun + self._took(low)), low

    def _took(self, steps: int) -> float:
        """Return the seconds of the first `steps` steps."""
        return steps * self._first + self._slope * (steps * (steps - 1) // 2)

    def _plan(self, when: float, steps: int) -> None:
        version, self._stop, self._stop_steps = self._version, when, steps
        self._loop.at(when, lambda: self._end(version, steps))

    def _end(self, version: int, steps: int) -> None:
        if version != self._version:
            return
        now = self._loop.now
        if steps:
            self._note(steps)
        changes, self._changes, self._steps = self._changes, [], 0
        ended = [each for each in self.active if not each.left]
        self.active = [each for each in self.active if each.left]
        for each in ended:
            each.metrics.finished = now
            self._on_end(each)
        for action in changes:
            action()
        self._begin()
        self._on_change(self)

    def _note(self, steps: int) -> None:
        """Account for steps that have ended."""
        rows, keys = len(self.active), sum(each.context for each in self.active)
        took = self._took(steps)
        self._on_steps(steps, rows, steps * keys + rows * (steps * (steps + 1) // 2), took)
        for each in self.active:
            each.context += steps
            each.left -= steps
            each.metrics.output_tokens += steps
            # The first of these steps waits for what came between the request's last token and it.
            assert each.metrics.last_token is not None
            first = self._begun + self._first - each.metrics.last_token
            each.metrics.longest_gap = max(each.metrics.longest_gap, first, self._first + self._slope * (steps - 1))
            each.metrics.last_token = self._begun + took

    def _begin(self) -> None:
        """Plan the steps until the next request ends."""
        if self._steps or self._changes or not self.active:
            return
        self._version += 1
        rows, keys = len(self.active), sum(each.context for each in self.active)
        self._begun, self._steps = self._loop.now, min(each.left for each in self.active)
        # A step computes a token of each, and reads its key too.
        self._first = self._seconds(rows, keys + rows)
        last = self._seconds(rows, keys + rows * self._steps)
        self._slope = (last - self._first) / max(1, self._steps - 1)
        assert math.isfinite(last)
        self._plan(self._begun + self._took(self._steps), self._steps)
