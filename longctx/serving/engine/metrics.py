"""Figures of an engine: `StepMetrics` of every step, `EngineStats` of all."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.scheduler.sequence import Sequence, completion_of


class StepMetrics(NamedTuple):
    """A step that has ended, by the engine's clock.

    Attributes:
      number: of the step, from 0.
      finished: when it ended.
      seconds: that it took, since it was begun or, if that was later, the step before ended. Where the host is slower
        than the devices, this is what the host takes for a step.
      is_exact: whether that is known, see `SubmitQueue`.
      predicted: seconds that it was to take, when it was planned.
      decodes: sequences that decoded a token in it.
      chunks: of prompts: (position of the first token, tokens) of each.
      rows: (request id, rows, whether it decodes) of each sequence in it, decodes first.
      admitted: ids of the requests whose sequences got slots and pages for it.
    """

    number: int
    finished: float
    seconds: float
    is_exact: bool
    predicted: float
    decodes: int
    chunks: tuple[tuple[int, int], ...]
    rows: tuple[tuple[str, int, bool], ...] = ()
    admitted: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: EndedStep) -> Self:
        chunks = tuple((chunk.start, chunk.num_tokens) for chunk in step.batch.chunks if not chunk.decodes)
        decodes = len(step.batch.chunks) - len(chunks)
        rows = tuple((_request_id(chunk.sequence), chunk.num_tokens, chunk.decodes) for chunk in step.batch.chunks)
        admitted = tuple(map(_request_id, step.batch.admitted))
        return cls(
            step.batch.index,
            step.finished,
            step.duration,
            step.is_exact,
            step.predicted,
            decodes,
            chunks,
            rows,
            admitted,
        )

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.chunks)


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and what it holds now."""

    steps: int
    prompt_tokens: int  # computed, not found in the cache
    output_tokens: int
    cached_tokens: int
    preemptions: int
    pages_evicted: int
    pages_held: int
    pages_cached: int
    running: int
    waiting: int
    idle_stage_steps: int  # stages of the pipeline that had nothing to do in a step, summed over steps


def _request_id(sequence: Sequence) -> str:
    return completion_of(sequence).request_id
