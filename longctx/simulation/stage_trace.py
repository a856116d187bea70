"""When each batch was in each stage of an instance, and which pages each context rank held then."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple

from longctx.serving.scheduler.batch import Batch
from longctx.simulation.instance import Instance


class InStage(NamedTuple):
    """A batch in a stage: its index, rows of decodes and of prompts, and seconds that it takes there."""

    batch: int
    decodes: int
    prompt_tokens: int
    seconds: float


class Tick(NamedTuple):
    """All stages once, as long as the slowest of the batches in them.

    Attributes:
      start, seconds: by the clock of the simulation.
      stages: what is in each stage, the first one's first; None: nothing.
    """

    start: float
    seconds: float
    stages: tuple[InStage | None, ...]


class StageTrace:
    """Hears of every batch of an instance as it is planned; one of its `logs`.

    Attributes:
      ticks: in order of time; only those with something in a stage.
      pages: (time, pages that sequences hold on each context rank), as each batch is planned.

    Args:
      seconds: that a batch takes in one stage.
    """

    def __init__(self, seconds: Callable[[Batch], float], num_stages: int, num_ranks: int = 1) -> None:
        self.ticks: list[Tick] = []
        self.pages: list[tuple[float, tuple[int, ...]]] = []
        self.num_stages, self.num_ranks = num_stages, num_ranks
        self._seconds = seconds
        self._in_stages: deque[InStage | None] = deque([None] * num_stages, maxlen=num_stages)
        self._free = 0.0  # when the last tick ends

    def watch(self, instance: Instance) -> None:
        """The instance that it is a log of."""
        self._instance = instance

    def note_plan(self, batch: Batch) -> None:
        """A batch is planned, and submitted at once: it enters the first stage when the last tick has ended."""
        now, pool = self._instance.executor.now, self._instance.core.scheduler.pool
        self.pages.append((now, tuple(map(pool.held_on, range(self.num_ranks)))))
        entering = None
        if batch.chunks:
            decodes = sum(chunk.decodes for chunk in batch.chunks)
            entering = InStage(batch.index, decodes, batch.num_tokens - decodes, self._seconds(batch))
        self._in_stages.appendleft(entering)
        seconds = max((each.seconds for each in self._in_stages if each is not None), default=0.0)
        start = max(now, self._free)
        self._free = start + seconds
        if any(each is not None for each in self._in_stages):
            self.ticks.append(Tick(start, seconds, tuple(self._in_stages)))

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        """Tokens say nothing of times."""
