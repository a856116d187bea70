"""What an engine tells of itself: `StepMetrics` of every step, `EngineStats` of all."""

from dataclasses import dataclass
from typing import NamedTuple


class StepMetrics(NamedTuple):
    """Of a step that has ended. Seconds are the engine's clock's.

    Attributes:
      number: of the step, from 0.
      finished: when.
      seconds: it took, since it was begun or, if that was later, the step before ended.
      is_exact: whether the engine waited for it; else it ended at some time before it was looked at.
      predicted: seconds that it was to take, when it was planned.
      decodes: sequences that it wrote a token of.
      chunks: of prompts: (position of the first token, tokens) of each.
    """

    number: int
    finished: float
    seconds: float
    is_exact: bool
    predicted: float
    decodes: int
    chunks: tuple[tuple[int, int], ...]

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
