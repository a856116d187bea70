"""What runs batches: the interface, without JAX, and a queue of what has been submitted to it."""

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any, NamedTuple, Protocol

from longctx.serving.request.output import TokenLogprob
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence


class Results(NamedTuple):
    """The results of a batch, in the order of `Batch.sampled`."""

    tokens: List[int]
    logprobs: List[TokenLogprob | None]
    # Of prompt tokens, with the sequence and the position of the first of them.
    prompt_logprobs: List[tuple[Sequence, int, List[TokenLogprob]]]


class Executor(Protocol):
    """Runs batches in the order in which they are submitted. It reads tokens from `Sequence.completion`."""

    def submit(self, batch: Batch) -> Any:
        """Begin a batch, without waiting for it. In a pipeline of S stages S - 1 more bring it to its end."""
        ...

    def wait(self, pending: Any) -> Results:
        """The results of what `submit` returned."""
        ...

    def compile(self) -> None:
        """Compile all that `warm_up` runs."""
        ...

    def warm_up(self) -> None:
        """Do beforehand what happens once."""
        ...


class EndedStep(NamedTuple):
    """A batch, its results, and how long the step took that brought it to its end, by the queue's clock.

    `is_exact`: whether the step was waited for; else it ended at some time before it was looked at.
    """

    batch: Batch
    results: Results
    finished: float
    duration: float
    is_exact: bool

    @property
    def seconds(self) -> float | None:
        """How long the step took, if that is known."""
        return self.duration if self.is_exact else None


class SubmitQueue:
    """Submits batches to an executor, waits for the oldest, and measures steps.

    Args:
      stages: of the executor's pipeline: a batch is in the last one when `stages - 1` more have been submitted.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float], stages: int) -> None:
        self._executor, self._clock, self._stages = executor, clock, stages
        self._queue: deque[tuple[Batch, Any]] = deque()
        self._begun: dict[int, float] = {}  # when each batch was submitted, by its index
        self._idle_since = -math.inf  # when the last step ended

    def __bool__(self) -> bool:
        return bool(self._queue)

    def submit(self, batch: Batch) -> None:
        """Begin a batch. One that computes nothing has no results."""
        self._begun[batch.index] = self._clock()
        pending = self._executor.submit(batch)
        if batch.chunks:
            self._queue.append((batch, pending))

    def wait(self) -> EndedStep:
        """Wait for the oldest batch, which is in the last stage."""
        batch, pending = self._queue.popleft()
        before = self._clock()
        results = self._executor.wait(pending)
        now = self._clock()
        begun = self._begun[batch.index + self._stages - 1]
        self._begun = {index: at for index, at in self._begun.items() if index > batch.index}
        duration = now - max(begun, self._idle_since)
        self._idle_since = now
        # Nobody knows when it ended if it was looked at late, as when whoever takes the tokens takes their time.
        return EndedStep(batch, results, now, duration, is_exact=now - before >= duration / 2)
