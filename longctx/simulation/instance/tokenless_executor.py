"""The executor of an instance: a pipeline in virtual time whose sequences need no tokens."""

from collections.abc import Callable

from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.simulation.instance.device_speed import DeviceSpeed
from longctx.simulation.instance.host_times import HostTimes
from longctx.simulation.instance.tokenless import TokenlessCompletion
from longctx.simulation.instance.virtual_executor import Pending, VirtualExecutor


class TokenlessExecutor(VirtualExecutor):
    """Draws no tokens for sequences without tokens; to submit a batch takes the host some time."""

    def __init__(
        self,
        seconds: Callable[[Batch], float],
        vocab_size: int,
        plan: ParallelPlan,
        host: HostTimes,
        speed: DeviceSpeed | None,
    ) -> None:
        super().__init__(lambda batch: seconds(batch) + host.shared, vocab_size, plan.stage, speed)
        self._host_seconds = host.batch
        self.has_tokens = False  # whether any sequence has
        self.notes_prompts = False  # whether batches with prompts count as moves, as their pages leave for elsewhere
        self._moves: list[Batch] = []

    def submit(self, batch: Batch) -> Pending:
        self.now += self._host_seconds
        if batch.loads or batch.stores or (self.notes_prompts and has_prompts(batch)):
            self._moves.append(batch)
        return super().submit(batch)

    def take_moves(self) -> list[Batch]:
        """Batches since the last call that load or store pages, or read prompts where that is noted."""
        moves, self._moves = self._moves, []
        return moves

    def run(self, batch: Batch) -> list[int]:
        return super().run(batch) if self.has_tokens else [0] * len(batch.sampled)

    def _token(self, chunk: Chunk) -> int:
        return 0 if isinstance(chunk.sequence.completion, TokenlessCompletion) else super()._token(chunk)


def has_prompts(batch: Batch) -> bool:
    """Whether some of its rows are of prompts; those of decodes come first."""
    return bool(batch.chunks) and not batch.chunks[-1].decodes
