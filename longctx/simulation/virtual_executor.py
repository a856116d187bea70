"""An executor in virtual time: it computes nothing, and its clock moves by what each batch would take."""

import zlib
from collections.abc import Callable
from typing import NamedTuple

from longctx.serving.executor.executor import Results
from longctx.serving.scheduler.batch import Batch, Chunk


class _Pending(NamedTuple):
    ready: float
    tokens: list[int]


class VirtualExecutor:
    """Runs batches one after another, each in `seconds(batch)`; tokens are made up, but always the same ones.

    Give its `clock` to the engine that it runs for.
    """

    def __init__(self, seconds: Callable[[Batch], float], vocab_size: int) -> None:
        self.now = 0.0
        self._seconds, self._vocab_size = seconds, vocab_size
        self._free = 0.0  # when the device has done all that was submitted

    def clock(self) -> float:
        """Virtual seconds since the beginning."""
        return self.now

    def submit(self, batch: Batch) -> _Pending:
        self._free = max(self.now, self._free) + self._seconds(batch)
        return _Pending(self._free, self.run(batch))

    def wait(self, pending: _Pending) -> Results:
        self.now = max(self.now, pending.ready)
        return Results(pending.tokens, [None] * len(pending.tokens), [])

    def compile(self) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def run(self, batch: Batch) -> list[int]:
        """The tokens that are sampled, in order."""
        return [self._token(chunk) for chunk in batch.chunks if chunk.samples]

    def _token(self, chunk: Chunk) -> int:
        position = chunk.start + chunk.num_tokens
        return zlib.crc32(f"{chunk.sequence.name} {position}".encode()) % self._vocab_size
