"""The shapes that steps are compiled for: rows of each kind, and sizes of the messages between ranks."""

import itertools
import operator
from collections.abc import Iterator
from typing import NamedTuple

from longctx.models.config import LlamaConfig
from longctx.parallel.cost import ModelShape
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.runner.step_inputs import Shape
from longctx.serving.scheduler.exchange_rule import Rows, is_full

_LEAST_PAGES, _FACTOR = 64, 4


class Message(NamedTuple):
    """Pages that a rank sends at a time, and how many times at most. With 0 pages, only new keys travel."""

    pages: int
    rounds: int

    def rounds_for(self, pages: int) -> int:
        """Return how many messages it takes to send `pages` pages."""
        return -(-pages // self.pages) if self.pages else 1


NOTHING_CACHED = Message(0, 1)


def make_messages(num_pages: int, entries: int, page_bytes: float, most_bytes: float) -> list[Message]:
    """Make messages whose lengths grow by a factor of 4 from 64 pages to those of the longest sequence.

    Each is sent up to 4 times, so that little of what is sent is padding, and the longest one any number of times: it
    has a limit in bytes, and sequences that are packed may have more pages than the longest.
    """
    most = max(1, min(num_pages, int(most_bytes / page_bytes)))
    lengths = [min(_LEAST_PAGES, most)]
    while _FACTOR * lengths[-1] <= min(entries, most):
        lengths.append(_FACTOR * lengths[-1])
    rounds = [-(-longer // length) for length, longer in itertools.pairwise([*lengths, num_pages])]
    return list(map(Message, lengths, rounds))


def choose_message(messages: list[Message], pages: int) -> Message:
    """Return the longest message that `pages` pages fill, those of the rank that has most."""
    return max((x for x in messages if x.pages <= pages), default=messages[0])


MOST_BYTES = 1 << 30
"""Of a message of cached pages: what is more goes in several."""


class StepShapes:
    """Rounds rows up to buckets, for each kind of rows, and says which exchanges the sharded ones may take.

    Attributes:
      num_window_pages: of each rank; 0: no layer has a window.
    """

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        plan: ParallelPlan,
        num_pages: int,
        entries: int,
        element_bytes: float,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._config, self._plan, self._num_pages = config, plan, num_pages
        longest = entries * config.page_size
        self.num_window_pages = config.count_window_pages(model.sliding_window, plan, num_pages, longest)
        self._num_top = min(config.max_logprobs, model.vocab_size)
        self._buckets = config.step_rows(plan)
        shape = ModelShape(model.num_heads, model.num_kv_heads, model.head_dim).split(plan.tensor)
        page_bytes = 2 * config.page_size * shape.num_kv_heads * shape.head_size * element_bytes
        sizes = {"pass_kv": most_bytes, "all_gather": most_bytes / plan.context}
        self._messages = {name: make_messages(num_pages, entries, page_bytes, most) for name, most in sizes.items()}

    def __iter__(self) -> Iterator[Shape]:
        """All shapes that serving may need."""
        for sharded, replicated, local in itertools.product(*self._buckets.kinds):
            rows = sharded, replicated, local
            if any(rows) and self._is_needed(rows):
                for exchange, messages in self._exchanges(rows).items():
                    for message in messages:
                        yield self._shape(rows, exchange, message)

    def largest_shapes(self) -> list[Shape]:
        """The shapes that no other exceeds in rows and messages: no step takes more memory than the most of theirs."""
        shapes = [*self]

        def exceeds(other: Shape, shape: Shape) -> bool:
            mine, theirs = ((*x[:3], x.message) for x in (shape, other))
            return other.exchange == shape.exchange and mine != theirs and all(map(operator.le, mine, theirs))

        return [shape for shape in shapes if not any(exceeds(other, shape) for other in shapes)]

    def holding(self, rows: Rows) -> Shape:
        """Return the smallest shape that has these rows of each kind."""
        return self._shape(self._buckets.round_up(rows))

    def of_step(self, rows: Rows, exchange: str, pages: int) -> Shape:
        """The smallest shape that holds all in-flight batches.

        Args:
          rows: the most of each kind that a batch has.
          exchange: of all in-flight batches with sharded rows: any gives the same result.
          pages: the most with cached keys that a rank may have to send for a batch.
        """
        buckets = self._buckets.round_up(rows)
        exchanges = self._exchanges(buckets)
        # Where nothing is cached, pass-Q has no query to send: new keys are gathered, and that is all.
        instead = "all_gather" if exchange == "pass_q" and not pages else exchange
        for name in (instead, exchange, "pass_kv", "pass_q", *exchanges):
            if name in exchanges:
                message = (
                    choose_message(self._messages[name], pages) if pages and name in self._messages else NOTHING_CACHED
                )
                if message in exchanges[name]:
                    return self._shape(buckets, name, message)
        raise AssertionError(f"no shape for {rows}, {exchange} of {pages} pages")

    def _exchanges(self, rows: Rows) -> dict[str, list[Message]]:
        """The exchanges that steps of such buckets are compiled for, each with its messages.

        Pass-Q needs none; steps full of sharded rows alone have all-gather of new keys besides.
        """
        named, names = str(self._plan.exchange), self._buckets.exchanges(rows)
        found = {name: [NOTHING_CACHED, *self._messages.get(name, [])] for name in names}
        if named == "pass_q" and is_full(self._buckets.kinds[0][1:], *rows):
            found["all_gather"] = [NOTHING_CACHED]
        return found

    def _is_needed(self, rows: Rows) -> bool:
        """Whether some batch, or with stages several, may need such buckets: a smaller one would not do."""
        least = 0
        for kind, count in zip(self._buckets.kinds, rows, strict=True):
            least += 1 + max(b for b in (0, *kind) if b < count) if count else 0
        return self._plan.stage > 1 or least <= self._config.token_budget

    def _shape(self, rows: Rows, exchange: str = "pass_q", message: Message = NOTHING_CACHED) -> Shape:
        sizes = (self._config.max_running, self._config.page_size, self._num_pages, self._num_top, self._plan.context)
        windows = self.num_window_pages
        return Shape.of(rows, *sizes, exchange, *message, ffn=self._plan.ffn, num_window_pages=windows)
