"""Executors in virtual time: they compute nothing, and their clock moves by what each batch would take."""

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from longctx.serving.config import MAX_RUN_AHEAD
from longctx.serving.executor.interface import Progress, Results, ignore_progress
from longctx.serving.kv_cache.connector import Loaded, PageLoad, PageRead, PageSource
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.simulation.event_loop import EventLoop, Thread
from longctx.simulation.instance.host_times import HostTimes
from longctx.simulation.instance.tokenless import TokenlessCompletion


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
        """Return the seconds of work that begins at `start` and is predicted to take `predicted` seconds."""
        done = _interpolate(start, self._real, self._done) + predicted
        return max(0.0, _interpolate(done, self._done, self._real) - start)


def _interpolate(at: float, x: np.ndarray, y: np.ndarray) -> float:
    """Beyond the last point with slope 1."""
    return float(np.interp(at, x, y)) + max(0.0, at - float(x[-1]))


@dataclass
class Pending:
    """A batch in the stages: the tokens that are sampled from it, and its times."""

    tokens: list[int]
    seconds: float  # in each stage
    ready: float = math.inf  # when it leaves the last stage, once it has entered that


class VirtualExecutor:
    """Runs batches in a pipeline of stages; tokens are made up, but always the same ones.

    Every submitted batch, also an idle one, moves those before it on by one stage. Such a tick takes as long as the
    slowest of the batches in the stages, and begins when the one before has ended. So a token takes as many ticks as
    there are stages. Give the executor's `clock` to the engine that it runs for, and the engine a plan of as many
    stages.

    Args:
      seconds: that a batch takes in one stage. It is not asked about idle batches, which take no time.
      vocab_size: below which tokens are.
      stages: of the pipeline.
      speed: at which the devices do what takes `seconds`, where it was measured.

    Attributes:
      now: virtual seconds.
      free: when the last tick ends.
      recent: the last batches that were submitted.
      sources: where loads would get their pages, by lease.

    Raises:
      ValueError: there is no stage.

    Source:
      Mnemosyne, 4.3 (the pipeline).

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.001 * batch.num_tokens, vocab_size=128_256, stages=4)
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256, token_budget=128)
      >>> plan = ParallelPlan(stage=4)
      >>> engine = Engine(model, None, config, plan=plan, executor=executor, clock=executor.clock)
      >>> [output] = engine.generate([[7] * 1280], SamplingParams(max_tokens=1))
      >>> round(output.metrics.ttft, 3)  # ten chunks of 128 ms, and three stages more for the last one: SPP
      1.664
    """

    def __init__(
        self,
        seconds: Callable[[Batch], float],
        vocab_size: int,
        stages: int = 1,
        speed: DeviceSpeed | None = None,
    ) -> None:
        if stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        self.now = self.free = 0.0
        self._seconds, self._vocab_size, self._speed = seconds, vocab_size, speed
        self._in_stages: deque[Pending] = deque(maxlen=stages)  # the last stage's first
        self.recent: deque[tuple[Batch, Pending]] = deque(maxlen=2 * stages + MAX_RUN_AHEAD)
        self.sources: dict[str, PageSource] = {}
        self._loads: list[PageLoad] = []

    def clock(self) -> float:
        """Seconds of virtual time since the beginning."""
        return self.now

    def submit(self, batch: Batch) -> Pending:
        """Begin a batch, and return what `wait` takes.

        Raises:
          ValueError: `seconds` returned a time that is negative or not finite.
        """
        self._loads += batch.loads
        seconds = self._seconds(batch) if batch.chunks else 0.0
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must return finite seconds of at least 0, got {seconds}")
        pending = Pending(self.run(batch), seconds)
        self._in_stages.append(pending)
        self.recent.append((batch, pending))
        is_full = len(self._in_stages) == self._in_stages.maxlen
        self._run_tick(max(each.seconds for each in self._in_stages), self._in_stages[0] if is_full else None)
        return pending

    def _run_tick(self, seconds: float, leaves: Pending | None) -> None:
        """Begin a tick after those before it; at its end a batch leaves the last stage."""
        begin = max(self.now, self.free)
        self.free = begin + (seconds if self._speed is None else self._speed.seconds(begin, seconds))
        if leaves is not None:
            leaves.ready = self.free

    def advance(self, first: int, ready: Callable[[int], float], now: float, free: float) -> None:
        """Advance as if the last batches, which have been advanced (`Batch.advance`), had just been submitted.

        Args:
          first: the number of the first of them.
          ready: when a batch leaves the last stage, by its number; infinite if it has not entered that.
          now: virtual seconds.
          free: when the last tick ends.
        """
        self.recent = deque((entry for entry in self.recent if entry[0].index >= first), self.recent.maxlen)
        for batch, pending in self.recent:
            pending.ready = ready(batch.index)
            if batch.chunks:
                pending.seconds = batch.predicted
        self.now, self.free = now, free

    def move_to(self, batches: List[tuple[Batch, Pending]], now: float, free: float) -> None:
        """Advance as if these batches, the last of them for the stages, had just been submitted; see `advance`."""
        self.recent, stages = deque(batches, self.recent.maxlen), self._in_stages.maxlen
        self._in_stages = deque((pending for _, pending in batches), stages)
        self.now, self.free = now, free

    def wait(self, pending: Pending) -> Results:
        """Move the clock to the end of a batch, and return tokens that are made up."""
        assert pending.ready < math.inf, "the batch has not entered the last stage: the engine's plan has fewer stages"
        self.now = max(self.now, pending.ready)
        return self.results(pending)

    def results(self, pending: Pending) -> Results:
        """Return the tokens of a batch."""
        return Results(pending.tokens, [None] * len(pending.tokens), [])

    def poll_loads(self, timeout: float = 0.0) -> list[Loaded]:
        """All loads: they come at once, and whole, as what they are to take is not known here."""
        loads, self._loads = self._loads, []
        return [Loaded(load.name, len(load.pages), 0.0) for load in loads]

    def read_pages(self, pages: List[int], layers: tuple[int, int], windows: List[int] | None = None) -> PageRead:
        """NotImplementedError: its pages hold nothing."""
        raise NotImplementedError("pages of a virtual executor hold nothing that could be read")

    def compile(self, progress: Progress = ignore_progress) -> None:
        """Nothing has to be compiled."""

    def warm_up(self) -> None:
        """Nothing has to be compiled."""

    def run(self, batch: Batch) -> list[int]:
        """The tokens that are sampled, in order."""
        return [self._token(chunk) for chunk in batch.chunks if chunk.samples]

    def _token(self, chunk: Chunk) -> int:
        position = chunk.start + chunk.num_tokens
        return zlib.crc32(f"{chunk.sequence.name} {position}".encode()) % self._vocab_size


class TokenlessExecutor(VirtualExecutor):
    """Draws no tokens for sequences without tokens; to submit a batch takes the host some time.

    Attributes:
      thread: that computes ticks, on cores that it shares; None: ticks take their seconds.
    """

    def __init__(
        self,
        seconds: Callable[[Batch], float],
        vocab_size: int,
        plan: ParallelPlan,
        host: HostTimes,
        speed: DeviceSpeed | None,
    ) -> None:
        super().__init__(lambda batch: seconds(batch) + host.shared, vocab_size, plan.stage, speed)
        self._host_seconds = host.batch
        self.has_tokens = False  # whether any sequence has
        self.notes_prompts = False  # whether batches with prompts count as moves, as their pages leave for elsewhere
        self._moves: list[Batch] = []
        self.thread: Thread | None = None

    def share_cores(self, loop: EventLoop, thread: Thread, on_ready: Callable[[Pending], object]) -> None:
        """Have a thread compute all ticks and what the host does for them; `on_ready` is called with what is ready."""
        self._loop, self.thread, self._on_ready = loop, thread, on_ready
        self._host_until = 0.0  # to when the host's times are part of ticks

    def submit(self, batch: Batch) -> Pending:
        self.now += self._host_seconds
        if batch.loads or batch.stores or (self.notes_prompts and has_prompts(batch)):
            self._moves.append(batch)
        return super().submit(batch)

    def _run_tick(self, seconds: float, leaves: Pending | None) -> None:
        if self.thread is None:
            super()._run_tick(seconds, leaves)
            return
        now = self._loop.now
        of_host, self._host_until = self.now - max(now, min(self._host_until, self.now)), self.now
        self.thread.run(max(0.0, of_host) + seconds, lambda: self._end_tick(leaves))
        self.free = now + self.thread.seconds

    def _end_tick(self, leaves: Pending | None) -> None:
        assert self.thread is not None
        self.free = self._loop.now + self.thread.seconds
        if leaves is not None:
            leaves.ready = self._loop.now
            self._on_ready(leaves)

    def take_moves(self) -> list[Batch]:
        """Batches since the last call that load or store pages, or read prompts where that is noted."""
        moves, self._moves = self._moves, []
        return moves

    def run(self, batch: Batch) -> list[int]:
        return super().run(batch) if self.has_tokens else [0] * len(batch.sampled)

    def _token(self, chunk: Chunk) -> int:
        return 0 if isinstance(chunk.sequence.completion, TokenlessCompletion) else super()._token(chunk)


def has_prompts(batch: Batch) -> bool:
    """Whether some of its rows are of prompts; those of decodes come first."""
    return bool(batch.chunks) and not batch.chunks[-1].decodes
