"""The executor of a replay: results and times are those that were recorded, or else follow from them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from longctx.serving.executor.interface import Results
from longctx.serving.recording.records import NOT_FINITE, STOP, Ended
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.simulation.instance.device_speed import DeviceSpeed
from longctx.simulation.instance.virtual_executor import Pending, VirtualExecutor

GOES_ON, STOPS = 0, 1
"""Tokens of a replay: a completion ends with the second."""
_TOKENS = {STOP: STOPS, NOT_FINITE: -1}


class Outcome(NamedTuple):
    """How a completion ended, other than by its length: why, and with which of its samples, by number."""

    reason: int
    sample: int


class ReplayExecutor(VirtualExecutor):
    """Runs batches in virtual time.

    Args:
      outcomes: of completions, by the numbers of their sequences, where no record says it.
      seconds: that batches take, where no record says it; None: what their plan predicted.
      speed: see `VirtualExecutor`.

    Attributes:
      recorded: the results of the batch that is waited for next; None: they follow from `outcomes`.
    """

    def __init__(
        self,
        stages: int,
        outcomes: Mapping[int, Outcome],
        seconds: Callable[[Batch], float] | None = None,
        speed: DeviceSpeed | None = None,
    ) -> None:
        super().__init__(seconds or (lambda batch: batch.predicted), 2, stages, speed)
        self._outcomes = outcomes
        self.recorded: Ended | None = None

    def wait(self, pending: Pending) -> Results:
        recorded = self.recorded
        if recorded is None:
            return super().wait(pending)
        self.now = recorded.finished
        tokens = [GOES_ON] * len(pending.tokens)
        for sample, reason in recorded.ends:
            if sample < len(tokens):
                tokens[sample] = _TOKENS[reason]
        return Results(tokens, [None] * len(tokens), [])

    def _token(self, chunk: Chunk) -> int:
        outcome = self._outcomes.get(chunk.sequence.order)
        if outcome is None or chunk.start + chunk.num_tokens != chunk.sequence.prompt_length + outcome.sample:
            return GOES_ON
        return _TOKENS[outcome.reason]
