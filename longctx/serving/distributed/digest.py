"""A digest of what an engine decided, to be compared between processes, and the last decisions to be shown."""

from collections import deque
from collections.abc import Sequence as List
from typing import Any

from longctx.serving.scheduler.batch import Batch

_KEPT = 8


class DecisionDigest:
    """A hash of all that was planned and drawn, and the last of it."""

    def __init__(self) -> None:
        self.digest, self.count = 0, 0
        self._last: deque[Any] = deque(maxlen=_KEPT)

    def plan(self, batch: Batch) -> None:
        chunks = tuple((c.slot, c.start, c.num_tokens, *c.ranks, c.samples, c.sharded) for c in batch.chunks)
        pages = tuple((run.slot, run.first, *run.pages) for run in batch.tables)
        self._note(("plan", batch.index), chunks, pages)

    def draw(self, batch: Batch, tokens: List[int]) -> None:
        self._note(("draw", batch.index), tuple(tokens))

    def _note(self, name: tuple[str, int], *what: Any) -> None:
        # Of integers alone: Python's hash of strings is another in every process.
        self.digest = hash((self.digest, name[1], *what))
        self.count += 1
        self._last.append((name, what))

    def __str__(self) -> str:
        lines = []
        for (name, index), what in tuple(self._last):
            if name == "draw":
                lines.append(f"  step {index} drew {list(what[0])}")
            else:
                rows = "; ".join(f"slot {c[0]}: {c[2]} from {c[1]} on ranks {list(c[3:-2])}" for c in what[0])
                lines.append(f"  step {index} computes {rows or 'nothing'}; tables {list(what[1])}")
        return "\n".join(lines)
