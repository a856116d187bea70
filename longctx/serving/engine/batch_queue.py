"""`BatchQueue`: in-flight batches, and the limit of how far ahead they run."""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from itertools import islice

from longctx.serving.scheduler.batch import Batch

# Planning ahead hides some hundred microseconds. For longer than these seconds it isn't worth what an arrival waits.
AHEAD = 0.05


class BatchQueue:
    """Queue of batches that have begun and have not ended, in order.

    In a pipeline of S stages a batch is in the last one S - 1 steps after it began; if nothing else is to be computed
    until then, these steps are idle. A step takes as long as the slowest of the batches in the stages.

    Attributes:
      run_ahead: steps that are planned before the results of the first of them are there, at most.
      num_idle: stages that had nothing to do in a step, summed over steps.
    """

    def __init__(self, run_ahead: int, stages: int) -> None:
        self.num_idle = 0
        self.run_ahead, self._stages = run_ahead, stages
        self._queue: deque[Batch] = deque()
        self._in_stages: deque[Batch] = deque(maxlen=stages)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._queue)

    @property
    def in_stages(self) -> tuple[Batch, ...]:
        """The last batches that began, one for each stage, the oldest first; some may have ended."""
        return tuple(self._in_stages)

    @property
    def has_room(self) -> bool:
        """Whether one more batch may be planned now.

        The tokens of a batch with masks are drawn before the next step begins, which takes those before them.
        """
        if len(self._queue) >= 2 * self._stages and any(batch.needs_tokens for batch in self._queue):
            return False
        # Those before are in later stages: the steps in which they began have ended.
        return self.allows(len(self._queue), [batch.predicted for batch in islice(self._queue, self._stages - 1, None)])

    def allows(self, count: int, seconds: List[float]) -> bool:
        """Return whether one more batch may be planned behind `count` batches.

        Args:
          seconds: that those of them are predicted to take that are not in later stages.
        """
        return count < self.run_ahead + self._stages - 1 and sum(seconds) < AHEAD

    def is_steady(self, least: float, most: float) -> bool:
        """Whether batches that compute leave room for others alike, as long as each takes between these seconds."""
        return (self.run_ahead - 1) * most < AHEAD or least >= AHEAD

    def advance(self, times: int, seconds: Callable[[int], float]) -> None:
        """Advance as if the batches in the stages had been repeated, as if one by one."""
        steps = times * self._stages
        for batch in {id(each): each for each in (*self._in_stages, *self._queue)}.values():
            batch.advance(times, steps, seconds(batch.index + steps))
        self.num_idle += steps * sum(not batch.chunks for batch in self._in_stages)

    def move_to(self, in_flight: List[Batch], in_stages: List[Batch]) -> None:
        """Have these batches in flight, and these as the last that began, one for each stage."""
        self._queue, self._in_stages = deque(in_flight), deque(in_stages, self._stages)

    @property
    def lacks_successors(self) -> bool:
        """Whether the oldest batch needs more steps to be in the last stage."""
        return 0 < len(self._queue) < self._stages

    @property
    def slowest(self) -> Batch:
        """The slowest batch of the step in which the oldest one is in the last stage."""
        return max(islice(self._queue, self._stages), key=lambda batch: batch.predicted)

    def append(self, batch: Batch) -> None:
        self._queue.append(batch)
        self._in_stages.append(batch)
        self.num_idle += self._stages - sum(bool(x.chunks) for x in self._in_stages)
        self._drop_idle()

    def pop(self, batch: Batch) -> None:
        """Drop the oldest batch, which has ended."""
        oldest = self._queue.popleft()
        assert oldest is batch, "batches end in the order in which they began"
        self._drop_idle()

    def _drop_idle(self) -> None:
        """Drop idle steps, which have no results."""
        while self._queue and not self._queue[0].chunks:
            self._queue.popleft()
