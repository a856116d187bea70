"""A step on one rank that is being filled: the room that it has left, in rows and in predicted seconds."""

import math
from collections.abc import Callable, Iterable

from longctx.serving.predictor.runtime import Predictor, curves_of
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.step_budget import FilledStep, Share

_RANKS = (0,)
_UNKNOWN: tuple[object, dict[int, float]] = (None, {})
_GUESSES = 12  # of a size, before halves between one that fits and one that does not


class LocalBudget(FilledStep):
    """Rows and predicted seconds of a step on one rank, where all rows are local; `StepBudget` is one on several.

    A simulated hour has a million of them, so seconds are predicted by the curves of prompts' chunks.

    Args:
      tokens: rows that it may have.
      work: of the decodes, which are in it already.

    Attributes:
      rows: of all that is in it.
    """

    def __init__(self, predictor: Predictor, tokens: int, work: Work) -> None:
        super().__init__(tokens, work.rows, predictor.seconds(work))
        self.rows, self._work, self._predictor = work.rows, work, predictor
        # A chunk that is not in `_work` yet, as it may not be asked for.
        self._added: tuple[int, int, bool] | None = None
        self._seconds: float | None = self._begun  # None: of a chunk that was just taken, and they are not known yet
        self._curve_of = curves_of(predictor)
        # Of each prompt that was asked about: seconds by tokens of its chunk, and those that are known.
        self._curves: dict[Sequence, tuple[Callable[[int], float], dict[int, float]]] = {}

    @property
    def work(self) -> Work:
        """Work of all that is in it."""
        if self._added is not None:
            self._work, self._added = self._work.with_chunk(*self._added), None
        return self._work

    @property
    def seconds(self) -> float:
        """Predicted seconds of all that is in it."""
        if self._seconds is None:
            self._seconds = self._predictor.seconds(self.work)
        return self._seconds

    @property
    def is_full(self) -> bool:
        """Whether there is room for no row."""
        return self.rows >= self.tokens

    def spread(self, sequence: Sequence) -> int:
        """Tokens of a prompt for one row."""
        return 1

    def context(self, sequence: Sequence) -> int:
        """Tokens that a row of a prompt's next chunk attends to before the chunk."""
        return sequence.computed

    def room(self, sequence: Sequence) -> int:
        """Rows that there are for a prompt, which needs no more than it may compute now."""
        left, count = self.tokens - self.rows, sequence.plannable
        return count if count <= left else max(0, left)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether there is room for one token of a prompt at least."""
        return self.room(sequence) > 0 and self._seconds_of(sequence, 1) <= self.limit

    def seconds_with(self, sequence: Sequence, count: int) -> float:
        """Predicted seconds with `count` more tokens of a prompt."""
        return max(self.seconds, self._seconds_of(sequence, count)) if count > 0 else self.seconds

    def take(self, sequence: Sequence, count: int) -> None:
        """Add a prompt's next `count` tokens."""
        if count > 0:
            self.take_share(sequence, Share(count, _RANKS, False))

    def take_share(self, sequence: Sequence, share: Share) -> None:
        """Add a share of a prompt."""
        count, (_, known) = share.num_tokens, self._curves.get(sequence, _UNKNOWN)
        self._seconds = known.get(count)
        self._work, self._added = self.work, (sequence.computed, count, count == sequence.remaining)
        self.rows += count
        self.shares[sequence] = share
        self._curves = {}

    def take_whole(self, sequence: Sequence) -> bool:
        """Take all of a prompt, if there is room for it."""
        count = sequence.remaining
        if count > self.tokens - self.rows or sequence.plannable < count:
            return False
        if self._seconds_of(sequence, count) > self.limit:
            return False
        self.take(sequence, count)
        return True

    def fill(self, sequences: Iterable[Sequence]) -> None:
        """Take as much of each as there is room for: once one gets less than it may there is none."""
        for sequence in sequences:
            if self.take_whole(sequence):
                continue
            self.take(sequence, self.largest(sequence))
            if self.is_full or not self.has_all(sequence):
                return

    def beside(self, sequence: Sequence, count: int) -> "LocalBudget":
        """The same step with a chunk that is not taken yet."""
        other = object.__new__(LocalBudget)
        other.__dict__.update(self.__dict__)
        other.shares = {}
        other.take(sequence, count)
        other.shares, other._curves = {}, {}
        return other

    def largest(self, sequence: Sequence, share: float = 1.0) -> int:
        """The most tokens of a prompt for which there is room, in `share` of what the decodes leave of the step."""
        most = min(self.room(sequence), math.ceil(share * (self.tokens - self._begin)))
        if self.limit == math.inf or most <= 0:
            return max(0, most)
        limit = self._begun + share * (self.limit - self._begun)
        at_high = self._seconds_of(sequence, most)
        if at_high <= limit:
            return most
        # `low` fits, `high` does not. Where the curve crosses the limit is guessed by regula falsi (Illinois); a number
        # of guesses that would do for a smooth curve is followed by halves.
        low, high, below, above, side = 0, most, self._begun - limit, at_high - limit, 0
        guesses, (curve, _) = _GUESSES, self._curves[sequence]
        while high - low > 1:
            if guesses and below < above:
                guesses -= 1
                count = low - int(below / (above - below) * (high - low))
                count = low + 1 if count <= low else high - 1 if count >= high else count
            else:
                count = (low + high) // 2
            over = curve(count) - limit
            if over <= 0:
                low, below, above, side = count, over, above / 2 if side < 0 else above, -1
            else:
                high, above, below, side = count, over, below / 2 if side > 0 else below, 1
        return low

    def _seconds_of(self, sequence: Sequence, count: int) -> float:
        """Return the predicted seconds with `count` tokens of a prompt, at least one."""
        start = sequence.computed
        if sequence not in self._curves:
            self._curves[sequence] = self._curve_of(self.work, start), {}
        curve, known = self._curves[sequence]
        seconds = known.get(count)
        if seconds is None:
            is_last = count == sequence.length - start
            seconds = self._predictor.seconds(self.work.with_chunk(start, count, True)) if is_last else curve(count)
            known[count] = seconds
        return seconds
