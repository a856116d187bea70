"""The shapes that steps are compiled for, and which of them a step takes."""

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as List

from longctx.models.config import LlamaConfig
from longctx.serving.config import EngineConfig
from longctx.serving.executor.messages import Messages
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.runner.step_inputs import Shape

Rows = tuple[int, int, int]
"""Numbers of sharded, replicated and local rows."""


class StepShapes:
    """Rounds rows up to buckets, for each kind of rows.

    Args:
      num_pages: of each rank.
      entries: pages of the longest sequence.
      element_bytes: of keys and values.
    """

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        plan: ParallelPlan,
        num_pages: int,
        entries: int,
        element_bytes: float,
    ) -> None:
        self._config, self._plan, self._num_pages = config, plan, num_pages
        self._num_top = min(config.max_logprobs, model.vocab_size)
        self._buckets = _buckets(plan, config)
        self._messages = Messages(plan, model, self._buckets, entries, config.page_size, element_bytes)

    @property
    def largest(self) -> Rows:
        """The largest bucket of each kind of rows."""
        sharded, replicated, local = map(max, self._buckets)
        return sharded, replicated, local

    def __iter__(self) -> Iterator[Shape]:
        """All shapes that serving may need."""
        for rows in itertools.product(*self._buckets):
            if any(rows) and self._is_needed(rows):
                yield self._shape(rows)
                for message in self._messages.messages(rows):
                    yield self._shape(rows, "pass_kv", message)

    def holding(self, rows: Rows) -> Shape:
        """The smallest shape with so many rows of each kind."""
        return self._shape(self._round_up(rows))

    def of_step(self, rows: Rows, exchange: str, pages: int) -> Shape:
        """The smallest shape that holds all in-flight batches.

        Args:
          rows: the most of each kind that a batch has.
          exchange: of all in-flight batches with sharded rows: any gives the same result.
          pages: the most that pass-KV has to send for a batch.
        """
        buckets = self._round_up(rows if any(rows) else (0, 0, 1))
        if exchange == "pass_kv":
            return self._shape(buckets, *self._messages.of(buckets, pages))
        return self._shape(buckets)

    def _round_up(self, rows: Rows) -> Rows:
        sharded, replicated, local = (
            next(bucket for bucket in kind if bucket >= count) for kind, count in zip(self._buckets, rows, strict=True)
        )
        return sharded, replicated, local

    def _is_needed(self, rows: List[int]) -> bool:
        """Whether some batch, or with stages several, may need such buckets: a smaller one would not do."""
        least = 0
        for kind, count in zip(self._buckets, rows, strict=True):
            least += 1 + max(b for b in (0, *kind) if b < count) if count else 0
        return self._plan.stage > 1 or least <= self._config.token_budget

    def _shape(self, rows: tuple[int, ...], exchange: str = "pass_q", message: int = 0) -> Shape:
        sizes = (self._config.max_running, self._config.page_size, self._num_pages, self._num_top, self._plan.context)
        return Shape.of(rows, *sizes, exchange, message)  # type: ignore[arg-type]


def _buckets(plan: ParallelPlan, config: EngineConfig) -> tuple[tuple[int, ...], ...]:
    """Rows of each kind that steps are compiled for: sharded, replicated, local."""
    if plan.context == 1:
        return (0,), (0,), config.row_buckets
    buckets = (0, *config.growing_buckets(8))
    return buckets if plan.shards_rows else (0,), buckets, buckets
