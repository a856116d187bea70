"""`Load`: what an engine has to do, as of its last step: for admission, metrics and routers."""

from dataclasses import dataclass
from typing import NamedTuple, Self

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
      decoding: sequences that decode. decode_tokens: tokens of theirs that are in the cache.
      stats: counts since the engine was made.
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
    def of(cls, core: Core, stats: EngineStats, now: float) -> Self:
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
        return sum(self.pages_by_rank)

    @property
    def cache_usage(self) -> float:
        """The share of the pages that sequences hold, 0 to 1."""
        return self.pages_held / self.num_pages


def _is_fetched(sequence: Sequence) -> bool:
    """Whether the pages of its prompt come from another engine."""
    return sequence.source != TIERS and sequence.available > sequence.computed


class StepReport(NamedTuple):
    """A step that has ended, and the load after it."""

    metrics: StepMetrics
    load: Load

    @property
    def rows(self) -> tuple[tuple[str, int, bool], ...]:
        """(request id, rows, whether it decodes) of each sequence in the step."""
        return self.metrics.rows
