"""Which exchange a step's sharded rows take, and how long pass-KV's message is."""

from collections.abc import Sequence as List

from longctx.models import LlamaConfig
from longctx.parallel.choose import choose_ring
from longctx.parallel.cost import Hardware, ModelShape
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.scheduler.batch import Chunk

_LEAST_PAGES, _MOST_BYTES = 64, 1 << 30  # of a message


class ExchangeRule:
    """Both are static in a compiled step: messages come in lengths that double, and not with all numbers of rows.

    Args:
      buckets: of sharded, shared and own rows.
      entries: pages of the longest sequence.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        model: LlamaConfig,
        hardware: Hardware,
        buckets: tuple[tuple[int, ...], ...],
        entries: int,
        page_size: int,
    ) -> None:
        self._plan, self._hardware, self._buckets = plan, hardware, buckets
        self._shape = ModelShape(model.num_heads, model.num_kv_heads, model.head_dim).split(plan.tensor)
        bytes_of_page = 2 * page_size * self._shape.num_kv_heads * model.head_dim * hardware.bytes_per_element
        self._messages = [_LEAST_PAGES]
        while self._messages[-1] < entries and 2 * self._messages[-1] * bytes_of_page <= _MOST_BYTES:
            self._messages.append(2 * self._messages[-1])

    def messages(self, rows: tuple[int, ...]) -> List[int]:
        """Lengths of messages, in pages, that steps of such buckets may have; none: pass-Q alone.

        Under `"auto"` these are steps full of sharded rows, with a few others: with fewer, queries are less.
        """
        sharded, *others = rows
        if not sharded or self._plan.exchange not in ("pass_kv", "auto"):
            return []
        few = all(
            count <= min((b for b in kind if b), default=0)
            for count, kind in zip(others, self._buckets[1:], strict=True)
        )
        return self._messages if self._plan.exchange == "pass_kv" or (sharded == self._buckets[0][-1] and few) else []

    def choose(self, chunks: list[Chunk]) -> str:
        """For the sharded chunks of a batch. Decodes ask for all that is cached of each: for them queries go round."""
        if self._plan.exchange != "auto":
            return self._plan.exchange
        if any(chunk.num_tokens == 1 for chunk in chunks):
            return "pass_q"
        tokens, cached = sum(chunk.num_tokens for chunk in chunks), max(chunk.start for chunk in chunks)
        times = choose_ring(tokens, cached, self._plan.context, self._shape, self._hardware).times
        return min(("pass_kv", "pass_q"), key=lambda name: times[name].total)

    def of(self, rows: tuple[int, ...], pages: int) -> tuple[str, int]:
        """Pass-KV with the least message that holds so many pages; pass-Q where there is none."""
        message = next((message for message in self.messages(rows) if message >= pages), None)
        return ("pass_q", 0) if message is None else ("pass_kv", message)
