"""A log replayed once as it was, with all that a replay under other settings goes by."""

from statistics import median

from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work
from longctx.serving.recording.records import NOT_FINITE, STOP
from longctx.serving.request.output import Event, Output
from longctx.serving.scheduler.batch import Batch
from longctx.simulation.incident.rebuilt import Outcome
from longctx.simulation.incident.replayer import Replayer


def decision_of(batch: Batch) -> int:
    """Hash what a batch decides, apart from where in memory it is: rows by sequence, and who was admitted."""
    rows = tuple((chunk.sequence.order, chunk.start, chunk.num_tokens, chunk.ranks) for chunk in batch.chunks)
    return hash((rows, tuple(sequence.order for sequence in batch.admitted)))


class StepTimes:
    """Seconds that a device takes for steps, as measured over all of a log: a predictor times a factor for each kind.

    The factors are measured over predicted seconds of all steps, as a decision may differ long before a scheduler has
    measured anything, and in the mean, so that all steps together take what they took.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._measured: list[tuple[bool, float, float]] = []  # kind, and seconds as measured and predicted
        self._factors: dict[bool, float] = {}

    def note(self, work: Work, seconds: float) -> None:
        """Add a measured step."""
        predicted = self._predictor.seconds(work)
        if predicted > 0 and seconds > 0:
            self._measured.append((bool(work.chunks), seconds, predicted))

    def fit(self) -> None:
        """Find the factors, when all steps have been added."""
        for kind in (False, True):
            rows = [row for row in self._measured if row[0] == kind] or self._measured
            self._factors[kind] = sum(row[1] for row in rows) / sum(row[2] for row in rows) if rows else 1.0

    def seconds(self, work: Work) -> float:
        """Return the seconds of a step."""
        return self._factors[bool(work.chunks)] * self._predictor.seconds(work)

    @property
    def error(self) -> float | None:
        """By how much predictions of the measured steps are off, as a share of all their time; None: of no step."""
        total = sum(seconds for _, seconds, _ in self._measured)
        errors = (abs(seconds - self._factors[kind] * predicted) for kind, seconds, predicted in self._measured)
        return sum(errors) / total if self._measured else None


class Baseline:
    """A replay of a log as it was.

    Attributes:
      decisions: a hash of each, in order. `decisions_until`: how many there are up to and with each step.
      durations: seconds of steps, by the number of the batch that they ended.
      outputs: of completions that have ended, by the numbers of their sequences.
      outcomes: see `ReplayExecutor`.
      times: see `StepTimes`.
      start: when the first step was planned.
      host_seconds: from the end of a step until the next is planned, the median: what the engine's thread does then.
      entry_seconds: from the arrival at an idle engine until its first step is planned, the median.
    """

    def __init__(self, replayer: Replayer) -> None:
        self.replayer = replayer
        self.decisions: list[int] = []
        self.decisions_until: list[int] = []
        self.durations: dict[int, float] = {}
        self.outputs: dict[int, Output] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.times = StepTimes(replayer.log.header.predictor)
        self.start = self.host_seconds = self.entry_seconds = 0.0

    def run(self) -> None:
        """Replay all of it; errors as of `Replayer.run`."""
        gaps, entries = list[float](), list[float]()
        ended: float | None = None  # when the step before ended, if requests were open then
        for moment in self.replayer.run():
            if moment.number is not None:
                if ended is not None:
                    gaps.append(moment.now - ended)
                elif moment.plans and moment.plans[0].chunks:
                    entries.append(moment.now - min(c.sequence.arrival for c in moment.plans[0].chunks))
                self.decisions += [decision_of(batch) for batch in moment.plans]
                if not self.decisions_until:
                    self.start = moment.now
                self.decisions_until.append(len(self.decisions))
                is_open = moment.ended is not None and bool(self.replayer.engine.requests)
                ended = moment.ended.finished if moment.ended is not None and is_open else None
            if moment.ended is not None:
                self.durations[moment.ended.batch.index] = moment.ended.duration
                if moment.ended.is_exact:
                    self.times.note(moment.work, moment.ended.duration)
            for event in moment.events:
                self._note(event)
        self.times.fit()
        self.host_seconds, self.entry_seconds = (max(0.0, median(x)) if x else 0.0 for x in (gaps, entries))

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
