"""How many rows of a step each prompt gets: chunk sizes, and prompts that share a step."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

from longctx.serving.policy import Policy, rank
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work
from longctx.serving.sequence import Sequence

# Shares of the tokens per second of the best chunk: below the first a chunk is a waste, above the second a larger one
# gains nothing, but keeps whoever comes meanwhile waiting.
_EFFICIENT, _BEST = 0.5, 0.95


class Chunking(NamedTuple):
    """`static`: `tokens` rows in every step (Sarathi). `adaptive`: up to `tokens`, as many as keep the decodes' TPOT.

    Source: Medha, 3.2; Mnemosyne, 4.2.
    """

    adaptive: bool
    tokens: int

    @classmethod
    def parse(cls, text: str, token_budget: int, max_running: int) -> "Chunking":
        """From `"static"`, `"static:N"` or `"adaptive"`.

        Raises:
          TypeError, ValueError: it is none of these, or N is not `max_running` to `token_budget`: with fewer, decodes
            might leave no row for any prompt.
        """
        if not isinstance(text, str):
            raise TypeError(f"chunking must be a string, got {text!r}")
        name, colon, number = text.partition(":")
        if name not in ("static", "adaptive") or (colon and (name == "adaptive" or not number.isdecimal())):
            raise ValueError(f'chunking must be "static", "static:N" or "adaptive", got {text!r}')
        tokens = int(number) if colon else token_budget
        if not max_running <= tokens <= token_budget:
            raise ValueError(
                f"chunking must have max_running={max_running} to token_budget={token_budget} tokens, got {text!r}"
            )
        return cls(name == "adaptive", tokens)


class Packer:
    """Fills steps with chunks of prompts.

    With adaptive chunking a step takes the time that the tightest TPOT target of its decodes allows, by prediction; so
    chunks shrink as the context before them grows. They don't shrink below the smallest efficient chunk, whatever the
    target, and where there is no target they are no larger than is of use. With static chunking, tokens are what is
    shared out.
    """

    def __init__(self, policy: Policy, predictor: Corrected, chunking: Chunking) -> None:
        self.policy, self.predictor, self.chunking = policy, predictor, chunking
        self._sizes = sorted({*(1 << i for i in range(chunking.tokens.bit_length())), chunking.tokens})

    def pack(
        self, prompts: List[Sequence], decodes: List[Sequence], work: Work, now: float
    ) -> list[tuple[Sequence, int]]:
        """Tokens for each prompt that gets some; `work` is that of the step's decodes."""
        tokens = self.chunking.tokens - len(decodes)
        if not prompts or tokens <= 0:
            return []
        head, *others = rank(self.policy, prompts, now)
        seconds, least = self._time(decodes), 1
        if seconds < math.inf:
            least = min(self._smallest(head.computed, _EFFICIENT), head.remaining, tokens)
        elif self.chunking.adaptive:
            tokens = min(self._smallest(head.computed, _BEST), tokens)
        step = _Step(self.predictor, work, tokens, seconds)
        lent, borrowers = self._lend(head, others, now)
        if lent > 0:
            # Beside what the head keeps. It may end within that: then it lends nothing, and they get what is left.
            beside = step.beside(head, max(least, step.largest(head, 1 - lent)))
            beside.fill(borrowers)
            for borrower, count in beside.chunks.items():
                step.take(borrower, count)
        step.take(head, max(least, step.largest(head)))
        if step.chunks[head] == head.remaining:
            step.fill(other for other in others if other not in step.chunks)
        return list(step.chunks.items())

    def _time(self, decodes: List[Sequence]) -> float:
        """Seconds that a step may take."""
        if not self.chunking.adaptive:
            return math.inf
        return min([s.tpot_target for s in decodes if s.tpot_target is not None], default=math.inf)

    def _smallest(self, start: int, efficient: float) -> int:
        """The smallest chunk after `start` tokens that reaches such a share of the best one's speed, read alone."""
        seconds = [self.predictor.seconds(Work().with_chunk(start, size, False)) for size in self._sizes]
        least = min(time / size for size, time in zip(self._sizes, seconds, strict=True))
        return next(size for size, time in zip(self._sizes, seconds, strict=True) if efficient * time <= least * size)

    def _lend(self, head: Sequence, others: List[Sequence], now: float) -> tuple[float, list[Sequence]]:
        """The share of the step that the most urgent prompt lends, and to whom: to those that need less than it."""
        borrowers = [s for s in others if s.rest < head.rest and s.priority == head.priority]
        return min(1.0, max((self.policy.share(s, now) for s in borrowers), default=0.0)), borrowers


class _Step:
    """A step that is being filled."""

    def __init__(self, predictor: Predictor, work: Work, tokens: int, limit: float) -> None:
        self.predictor, self.work, self.tokens, self.limit = predictor, work, tokens, limit
        self.begin = 0.0 if limit == math.inf else predictor.seconds(work)
        self.all_tokens = tokens
        self.chunks: dict[Sequence, int] = {}

    def take(self, sequence: Sequence, count: int) -> None:
        if count > 0:
            self.chunks[sequence] = count
            self.work = self._with(sequence, count)
            self.tokens -= count

    def fill(self, sequences: Iterable[Sequence]) -> None:
        """Take as much of each as there is room for, until one gets less than all of it: then there is none."""
        for sequence in sequences:
            count = self.largest(sequence)
            self.take(sequence, count)
            if count < sequence.remaining:
                return

    def beside(self, sequence: Sequence, count: int) -> "_Step":
        """The same with a chunk that is not taken yet."""
        return _Step(self.predictor, self._with(sequence, count), self.tokens - count, self.limit)

    def largest(self, sequence: Sequence, share: float = 1.0) -> int:
        """The most tokens of a prompt for which there is room, in `share` of what the decodes leave of the step."""
        most = min(sequence.remaining, self.tokens, math.ceil(share * self.all_tokens))
        if self.limit == math.inf or most <= 0:
            return max(0, most)
        limit = self.begin + share * (self.limit - self.begin)
        low, high = 0, most + 1  # low fits, high does not
        while high - low > 1:
            count = high - 1 if low == 0 and high == most + 1 else (low + high) // 2
            if self.predictor.seconds(self._with(sequence, count)) <= limit:
                low = count
            else:
                high = count
        return low

    def _with(self, sequence: Sequence, count: int) -> Work:
        return self.work.with_chunk(sequence.computed, count, count == sequence.remaining)
