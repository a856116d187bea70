"""A digest of an engine's decisions, which processes compare, and the last decisions for error messages."""

from collections import deque
from collections.abc import Sequence as List
from typing import Any

from longctx.serving.scheduler.batch import Batch

_NUM_SHOWN = 8


class DecisionDigest:
    """A running hash of all planned batches and sampled tokens, and the last few of them as text."""

    def __init__(self) -> None:
        self.digest, self.count = 0, 0
        self._last: deque[Any] = deque(maxlen=_NUM_SHOWN)

    def add_plan(self, batch: Batch) -> None:
        """Add a planned batch: its chunks and its new page table entries."""
        chunks = tuple((c.slot, c.start, c.num_tokens, *c.ranks, c.samples, c.sharded) for c in batch.chunks)
        pages = tuple((run.slot, run.first, *run.pages) for run in batch.tables)
        self._add(("plan", batch.index), chunks, pages)

    def add_tokens(self, batch: Batch, tokens: List[int]) -> None:
        """Add the tokens sampled from a batch."""
        self._add(("tokens", batch.index), tuple(tokens))

    def _add(self, name: tuple[str, int], *decision: Any) -> None:
        # The hash covers integers only: Python's hash of a string differs from process to process.
        self.digest = hash((self.digest, name[1], *decision))
        self.count += 1
        self._last.append((name, decision))

    def __str__(self) -> str:
        lines = []
        for (name, index), decision in tuple(self._last):
            if name == "tokens":
                lines.append(f"  step {index} sampled {list(decision[0])}")
            else:
                rows = "; ".join(f"slot {c[0]}: {c[2]} from {c[1]} on ranks {list(c[3:-2])}" for c in decision[0])
                lines.append(f"  step {index} computes {rows or 'nothing'}; tables {list(decision[1])}")
        return "\n".join(lines)
