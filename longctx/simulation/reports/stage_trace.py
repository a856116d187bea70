"""Trace of a simulated instance: batches in its stages, chunks, pages by context rank."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Generic, NamedTuple, TypeVar

from longctx.serving.scheduler.batch import Batch
from longctx.simulation.instance.instance import Instance

T = TypeVar("T")
_POINTS = 4000  # of a curve, about: no more can be told apart
WINDOW = 120  # ticks of a Gantt chart


class Thinned(Generic[T]):
    """Values, evenly thinned: whenever there are too many, every other one goes."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._stride, self._next = 1, 0

    def append(self, value: T) -> None:
        if self._next == 0:
            self.values.append(value)
            self._next = self._stride
            if len(self.values) > 2 * _POINTS:
                self.values = self.values[::2]
                self._stride *= 2
        self._next -= 1


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
      ranks: seconds of each context rank, by prediction, of the batch that enters; empty: of one rank, or none enters.
    """

    start: float
    seconds: float
    stages: tuple[InStage | None, ...]
    ranks: tuple[float, ...]

    @property
    def has_prompt(self) -> bool:
        """True if a batch in some stage has tokens of a prompt."""
        return any(batch is not None and batch.prompt_tokens for batch in self.stages)


class Load(NamedTuple):
    """State when a batch is planned: requests that run and wait, and pages held on each context rank."""

    time: float
    running: int
    waiting: int
    pages: tuple[int, ...]


class StageTrace:
    """Hears of every batch of an instance as it is planned; one of its `logs`.

    Attributes:
      ticks: in order of time, only those with something in a stage; empty unless `keeps_ticks`.
      busiest: consecutive ticks, of which more have prompts than of others.
      loads: see `Load`, thinned. chunks: (time, tokens) of chunks of prompts, thinned.

    Args:
      seconds: that a batch takes in one stage.
      keeps_ticks: whether all ticks are kept; they take about a kilobyte each.
    """

    def __init__(
        self, seconds: Callable[[Batch], float], num_stages: int, num_ranks: int = 1, keeps_ticks: bool = True
    ) -> None:
        self.num_stages, self.num_ranks = num_stages, num_ranks
        self.ticks: list[Tick] = []
        self.busiest: list[Tick] = []
        self.loads, self.chunks = Thinned[Load](), Thinned[tuple[float, int]]()
        self._seconds, self._keeps_ticks = seconds, keeps_ticks
        self._window: list[Tick] = []
        self._prompts = self._most = 0  # ticks with prompts in it, and in the busiest
        self._in_stages: deque[InStage | None] = deque([None] * num_stages, maxlen=num_stages)
        self._free = 0.0  # when the last tick ends

    def watch(self, instance: Instance) -> None:
        """The instance that it is a log of."""
        self._instance = instance

    def note_plan(self, batch: Batch) -> None:
        """A batch is planned, and submitted at once: it enters the first stage when the last tick has ended."""
        now, scheduler = self._instance.executor.now, self._instance.core.scheduler
        pages = tuple(map(scheduler.pool.held_on, range(self.num_ranks)))
        self.loads.append(Load(now, len(scheduler.running), len(scheduler.waiting), pages))
        entering = None
        if batch.chunks:
            prompts = [chunk.num_tokens for chunk in batch.chunks if not chunk.decodes]
            decodes = len(batch.chunks) - len(prompts)
            entering = InStage(batch.index, decodes, sum(prompts), self._seconds(batch))
            for count in prompts:
                self.chunks.append((now, count))
        self._in_stages.appendleft(entering)
        seconds = max((each.seconds for each in self._in_stages if each is not None), default=0.0)
        start = max(now, self._free)
        self._free = start + seconds
        if seconds > 0:
            ranks = batch.rank_seconds if batch.chunks and self.num_ranks > 1 else ()
            self._add(Tick(start, seconds, tuple(self._in_stages), ranks))

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        """Tokens say nothing of times."""

    def _add(self, tick: Tick) -> None:
        if self._keeps_ticks:
            self.ticks.append(tick)
        if len(self._window) == WINDOW:
            self._window, self._prompts = [], 0
        self._window.append(tick)
        self._prompts += tick.has_prompt
        if self._prompts > self._most or not self.busiest:
            self.busiest, self._most = self._window, self._prompts  # which may go on
