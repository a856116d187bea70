"""Figures of an engine: `StepMetrics` of every step, `EngineStats` of all, and `Load` after one."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.scheduler.batch import Exchange
from longctx.serving.scheduler.sequence import State, completion_of

logger = logging.getLogger(__name__)


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
      rank_seconds: predicted seconds of each context rank, had it not to wait for the others.
      exchange: what its rows exchanged over context ranks, and why; None: nothing.
      first_tokens: seconds since its arrival of each sequence that got its first token.
      gaps: seconds since its last token of each sequence that got another.
      blocked: ids of requests that found no room in memory when it was planned: those that run and wait to grow, and
        the most urgent one that waits. Others may pass them if their reservations hold (docs/scheduling.md).

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256, chunking="static")
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> steps = []
      >>> engine.add_monitor(steps.append)
      >>> _ = engine.generate([[7] * 700], SamplingParams(max_tokens=3))
      >>> [(step.number, round(step.seconds, 3), step.chunks, step.decodes) for step in steps]
      [(0, 0.01, ((0, 512),), 0), (1, 0.01, ((512, 188),), 0), (2, 0.01, (), 1), (3, 0.01, (), 1)]
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
    rank_seconds: tuple[float, ...] = ()
    exchange: Exchange | None = None
    first_tokens: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    blocked: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: EndedStep) -> "StepMetrics":
        """Measure a step whose results the core has not taken yet.

        Returns:
          What a monitor is given.
        """
        batch, finished, is_over = step.batch, step.finished, State.FINISHED
        rows, chunks, first_tokens, gaps = [], [], [], []
        for sequence, _, start, count, does_sample, decodes, _, _ in batch.chunks:  # in one pass: there may be hundreds
            completion = completion_of(sequence)
            rows.append((completion.request_id, count, decodes))
            if not decodes:
                chunks.append((start, count))
            if does_sample and sequence.state is not is_over:
                metrics = completion.metrics
                if metrics.last_token is None:
                    first_tokens.append(finished - metrics.arrival)
                else:
                    gaps.append(finished - metrics.last_token)
        return cls(
            batch.index,
            finished,
            step.duration,
            step.is_exact,
            step.predicted,
            len(rows) - len(chunks),
            tuple(chunks),
            tuple(rows),
            tuple(completion_of(sequence).request_id for sequence in batch.admitted),
            batch.rank_seconds,
            batch.exchange,
            tuple(first_tokens),
            tuple(gaps),
            blocked=tuple(completion_of(sequence).request_id for sequence in batch.blocked),
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its chunks."""
        return sum(count for _, count in self.chunks)

    @property
    def idle_share(self) -> tuple[float, ...]:
        """The share of the step that each context rank waits for the slowest, by prediction."""
        longest = max(self.rank_seconds, default=0.0)
        return tuple(1 - seconds / longest if longest else 0.0 for seconds in self.rank_seconds)


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and what it holds now.

    Attributes:
      steps: batches that have ended.
      prompt_tokens: tokens of prompts that were computed, not found in the cache.
      output_tokens: tokens that were sampled.
      queried_tokens: tokens of prompts that were looked for in the cache.
      cached_tokens: those of them that were found.
      loaded_tokens: those of the found that came from beyond the devices.
      preemptions: how often a sequence was preempted.
      pages_evicted: pages whose contents were dropped for others.
      pages_held: pages that sequences hold.
      pages_cached: pages that no sequence holds, and that can be found.
      running, waiting: sequences.
      idle_stage_steps: stages of the pipeline that had nothing to do in a step, summed over steps.
      window_pages_held, window_pages_cached: pages of layers with a sliding window that sequences hold, and that none
        holds and that can be found; 0 without such layers.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> _ = engine.generate([[7] * 200], SamplingParams(max_tokens=10))
      >>> _ = engine.generate([[7] * 200 + [8]], SamplingParams(max_tokens=10))
      >>> stats = engine.stats()
      >>> stats.output_tokens, stats.queried_tokens, stats.cached_tokens  # three full pages of 64 were found
      (20, 401, 192)
    """

    steps: int
    prompt_tokens: int  # computed, not found in the cache
    output_tokens: int
    queried_tokens: int  # of prompts that were looked for in the cache
    cached_tokens: int
    loaded_tokens: int  # those of them that came from beyond the devices
    preemptions: int
    pages_evicted: int
    pages_held: int
    pages_cached: int
    running: int
    waiting: int
    idle_stage_steps: int  # stages of the pipeline that had nothing to do in a step, summed over steps
    window_pages_held: int = 0
    window_pages_cached: int = 0


@dataclass(frozen=True)
class Load:
    """Snapshot of an engine's load.

    Attributes:
      time: by the engine's clock.
      running, waiting: sequences.
      waiting_tokens: tokens of prompts of waiting sequences, but those that were in the cache when they came.
      backlog_seconds: predicted seconds of all prompts' tokens that are not computed yet, one after the other, but
        those whose pages come from another engine.
      num_pages: pages of the cache, on all ranks together.
      free_pages: those that can still be promised to sequences: unheld, though perhaps cached.
      pages_by_rank: pages that sequences hold, on each context rank.
      stats: counts since the engine was made.
      decoding: sequences that decode.
      decode_tokens: tokens of theirs that are in the cache.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, EngineThread
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> with EngineThread(engine) as thread:
      ...     load = thread.load  # of an engine that has nothing to do
      >>> load.running, load.waiting, load.free_pages, load.cache_usage
      (0, 0, 256, 0.0)
    """

    time: float
    running: int
    waiting: int
    waiting_tokens: int
    backlog_seconds: float
    num_pages: int
    free_pages: int
    pages_by_rank: tuple[int, ...]
    stats: EngineStats
    decoding: int = 0
    decode_tokens: int = 0

    @property
    def pages_held(self) -> int:
        """Pages that sequences hold, on all ranks."""
        return sum(self.pages_by_rank)

    @property
    def cache_usage(self) -> float:
        """The share of the pages that sequences hold, 0 to 1."""
        return self.pages_held / self.num_pages


StepMonitor = Callable[[StepMetrics], object]


def notify(observers: list[Callable[..., object]], *arguments: object) -> None:
    """Call observers of an engine, in order; one that raises is removed."""
    for observer in tuple(observers):
        try:
            observer(*arguments)
        except Exception:
            observers.remove(observer)
            logger.exception("an observer of the engine raised, and is not called any more")
