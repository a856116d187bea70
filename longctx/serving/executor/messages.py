"""How long pass-KV's messages are: a few lengths, as each is static in a compiled step."""

from collections.abc import Sequence as List

from longctx.models.config import LlamaConfig
from longctx.parallel.cost import ModelShape
from longctx.serving.parallel_plan import ParallelPlan

_LEAST_PAGES, _MOST_BYTES = 64, 1 << 30  # of a message


class Messages:
    """Messages come in lengths that double, and not with all numbers of rows.

    Args:
      buckets: of sharded, replicated and local rows.
      entries: pages of the longest sequence.
      element_bytes: of keys and values.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        model: LlamaConfig,
        buckets: tuple[tuple[int, ...], ...],
        entries: int,
        page_size: int,
        element_bytes: float,
    ) -> None:
        self._plan, self._buckets = plan, buckets
        shape = ModelShape(model.num_heads, model.num_kv_heads, model.head_dim).split(plan.tensor)
        bytes_of_page = 2 * page_size * shape.num_kv_heads * model.head_dim * element_bytes
        self._messages = [_LEAST_PAGES]
        while self._messages[-1] < entries and 2 * self._messages[-1] * bytes_of_page <= _MOST_BYTES:
            self._messages.append(2 * self._messages[-1])

    def messages(self, rows: tuple[int, ...]) -> List[int]:
        """Lengths of messages, in pages, that steps of such buckets may have; none: pass-Q alone.

        Under `"auto"` these are steps full of sharded rows, with a few others: with fewer, queries are less.
        """
        sharded, *others = rows
        if not sharded or self._plan.exchange in ("kvp", "pass_q", "all_gather"):
            return []
        few = all(
            count <= min((b for b in kind if b), default=0)
            for count, kind in zip(others, self._buckets[1:], strict=True)
        )
        return self._messages if self._plan.exchange == "pass_kv" or (sharded == self._buckets[0][-1] and few) else []

    def of(self, rows: tuple[int, ...], pages: int) -> tuple[str, int]:
        """Pass-KV with the least message that holds so many pages; pass-Q where there is none."""
        message = next((message for message in self.messages(rows) if message >= pages), None)
        return ("pass_q", 0) if message is None else ("pass_kv", message)
