"""`Load`: what an engine has to do, as of its last step: for admission, metrics and routers."""

from dataclasses import dataclass
from typing import NamedTuple

from longctx.serving.engine.core import Core
from longctx.serving.engine.metrics import EngineStats, StepMetrics
from longctx.serving.kv_cache.connector import TIERS
from longctx.serving.scheduler.sequence import Sequence


@dataclass(frozen=True)
class Load:
    """A snapshot.

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

    @classmethod
    def of(cls, core: Core, stats: EngineStats, now: float) -> "Load":
        """The load of a core.

        Args:
          core: of the engine.
          stats: of the engine.
          now: seconds of its clock.
        """
        waiting, running, pool = tuple(core.scheduler.waiting), core.scheduler.running, core.pool
        prompts, decoding = (*waiting, *running.prefilling), tuple(running.decoding)
        return cls(
            time=now,
            running=len(running),
            waiting=len(waiting),
            waiting_tokens=sum(sequence.length - sequence.prefix_hit_tokens for sequence in waiting),
            backlog_seconds=sum(sequence.prefill_remaining for sequence in prompts if not _is_fetched(sequence)),
            num_pages=pool.num_pages,
            free_pages=pool.num_available,
            pages_by_rank=tuple(map(pool.held_on, range(pool.num_ranks))),
            stats=stats,
            decoding=len(decoding),
            decode_tokens=sum(sequence.computed for sequence in decoding),
        )

    @property
    def pages_held(self) -> int:
        """Pages that sequences hold, on all ranks."""
        return sum(self.pages_by_rank)

    @property
    def cache_usage(self) -> float:
        """The share of the pages that sequences hold, 0 to 1."""
        return self.pages_held / self.num_pages


def _is_fetched(sequence: Sequence) -> bool:
    """Whether the pages of its prompt come from another engine."""
    return sequence.source != TIERS and sequence.available > sequence.computed


class StepReport(NamedTuple):
    """A step that has ended, and the load after it.

    Attributes:
      metrics: of the step.
      load: of the engine, when it had ended.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, EngineThread, Request, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> import queue
      >>> reports, ended = queue.Queue(), queue.Queue()
      >>> with EngineThread(engine) as thread:
      ...     thread.on_step.append(reports.put)
      ...     _ = thread.submit(engine.prepare(Request([7] * 100, SamplingParams(max_tokens=1))), ended.put)
      ...     report = reports.get()
      >>> report.rows  # request, rows, whether it decodes
      (('request-0', 100, False),)
    """

    metrics: StepMetrics
    load: Load

    @property
    def rows(self) -> tuple[tuple[str, int, bool], ...]:
        """(request id, rows, whether it decodes) of each sequence in the step."""
        return self.metrics.rows
