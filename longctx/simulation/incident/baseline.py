"""What happened: a log replayed once, with all that a replay under other settings goes by."""

from typing import NamedTuple

from longctx.serving.recording.records import NOT_FINITE, STOP
from longctx.serving.request.output import Event, Output
from longctx.serving.scheduler.batch import Batch
from longctx.simulation.incident.executor import Outcome
from longctx.simulation.incident.replayer import Replayer


class Decision(NamedTuple):
    """What a batch decides, apart from where in memory it is: rows by sequence, and who was admitted."""

    chunks: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    admitted: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch) -> "Decision":
        return cls(
            tuple((chunk.sequence.order, chunk.start, chunk.num_tokens, chunk.ranks) for chunk in batch.chunks),
            tuple(sequence.order for sequence in batch.admitted),
        )


class Baseline:
    """A replay of a log as it was.

    Attributes:
      decisions: a hash of each, in order. `decisions_until`: how many there are up to and with each step.
      durations: seconds of steps, by the number of the batch that they ended.
      outputs: of completions that have ended, by the numbers of their sequences.
      outcomes: see `ReplayExecutor`.
    """

    def __init__(self, replayer: Replayer) -> None:
        self.replayer = replayer
        self.decisions: list[int] = []
        self.decisions_until: list[int] = []
        self.durations: dict[int, float] = {}
        self.outputs: dict[int, Output] = {}
        self.outcomes: dict[int, Outcome] = {}

    def run(self) -> None:
        """Replay all of it; errors as of `Replayer.run`."""
        for moment in self.replayer.run():
            if moment.number is not None:
                self.decisions += [hash(Decision.of(batch)) for batch in moment.plans]
                self.decisions_until.append(len(self.decisions))
            if moment.ended is not None:
                self.durations[moment.ended.batch.index] = moment.ended.duration
            for event in moment.events:
                self._note(event)

    def _note(self, event: Event) -> None:
        output = event.output
        if output is None:
            return
        order = self.replayer.engine.orders[event.request_id, event.index]
        self.outputs[order] = output
        count = len(output.token_ids)
        if output.finish_reason == "stop":
            self.outcomes[order] = Outcome(STOP, count - 1)
        elif output.finish_reason == "error":
            self.outcomes[order] = Outcome(NOT_FINITE, count)
