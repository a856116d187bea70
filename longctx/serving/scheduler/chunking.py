"""How many rows of a step each prompt gets: chunk sizes, and prompts that share a step."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as List
from typing import NamedTuple

from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Chunk
from longctx.serving.scheduler.policy import Policy, by_urgency
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.step_budget import Share, StepBudget
from longctx.serving.scheduler.tenants import TenantShares
from longctx.serving.validation import shown

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
        is_number = number.isascii() and number.isdecimal() and len(number) < 10
        if name not in ("static", "adaptive") or (colon and (name == "adaptive" or not is_number)):
            raise ValueError(f'chunking must be "static", "static:N" or "adaptive", got {shown(text)}')
        tokens = int(number) if colon else token_budget
        if not max_running <= tokens <= token_budget:
            raise ValueError(
                f"chunking must have max_running={max_running} to token_budget={token_budget} tokens, got {text!r}"
            )
        return cls(name == "adaptive", tokens)


class Chunker:
    """Fills steps with chunks of prompts.

    With adaptive chunking a step takes the time that the tightest TPOT target of its decodes allows, by prediction; so
    chunks shrink as the context before them grows. They don't shrink below the smallest efficient chunk, whatever the
    target, and without a target they are no larger than is of use. With static chunking, prompts share tokens. As ranks
    wait for the slowest, no other prompt then makes a step longer than the most urgent one does, or than a full step of
    tokens without context.

    With several stages a token comes after as many steps, and a step takes the largest of the batches in the stages:
    so its time is a share of the target, and its rows don't grow by more than one bucket in as many steps.
    """

    def __init__(
        self,
        policy: Policy,
        predictor: Corrected,
        chunking: Chunking,
        plan: ParallelPlan | None = None,
        page_size: int = 1,
        buckets: List[int] = (),
        tenants: TenantShares | None = None,
    ) -> None:
        self.policy, self.predictor, self.chunking = policy, predictor, chunking
        self.plan, self.page_size = plan or ParallelPlan(), page_size
        self.tenants = tenants or TenantShares({})
        self._buckets = [*buckets] or [chunking.tokens]
        self._recent: deque[int] = deque(maxlen=self.plan.stage - 1)  # rows of the batches in later stages
        self._grown = -self.plan.stage  # how many batches ago rows grew
        self._sizes = sorted({*(1 << i for i in range(chunking.tokens.bit_length())), chunking.tokens})

    def pack(self, prompts: List[Sequence], decodes: List[Chunk], now: float) -> dict[Sequence, Share]:
        """The share of each prompt that gets one, beside the decodes."""
        if not prompts:
            return {}
        step = self._step(decodes)
        step.tokens = min(step.tokens, max(self._ramp(step.rows), step.rows))
        if step.tokens <= step.rows:
            return {}
        ranked = by_urgency(self.policy, prompts, now, self.tenants)
        head = next(ranked)
        seconds, least = self._time(decodes), 1
        if seconds < math.inf:
            least = self._smallest(head.computed, _EFFICIENT)
        elif self.chunking.adaptive:
            step.tokens = min(self._smallest(head.computed, _BEST) + step.rows, step.tokens)
        step.limit = seconds
        others = list(ranked)
        lent, borrowers = self._lend(step, head, others, now)
        if lent > 0:
            # Beside what the head keeps. It may end within that: then it lends nothing, and they get what is left.
            beside = step.beside(head, max(min(least, step.room(head)), step.largest(head, 1 - lent)))
            beside.fill(borrowers)
            for borrower, share in beside.shares.items():
                step.take_share(borrower, share)
        step.take(head, max(min(least, step.room(head)), step.largest(head)))
        takes_all = head in step.shares and step.shares[head].num_tokens == head.remaining
        if self.plan.context > 1 and step.limit == math.inf:
            step.limit = max(step.seconds, self.predictor.seconds(Work(step.tokens)))
        if self.plan.context > 1 or takes_all:
            step.fill(other for other in others if other not in step.shares)
        return step.shares

    def note(self, chunks: List[Chunk]) -> None:
        """Remember the rows of a batch that has been planned; it may be empty."""
        if self.plan.stage > 1:
            rows = self._step(chunks).rows
            grows = self._bucket(rows) > self._bucket(max(self._recent, default=0))
            self._grown = -1 if grows else self._grown - 1
            self._recent.append(rows)

    def state(self) -> tuple[list[int], int]:
        """What it remembers of batches that have been planned."""
        return list(self._recent), self._grown

    def restore(self, recent: List[int], grown: int) -> None:
        """Take over a `state`."""
        self._recent.extend(recent)
        self._grown = grown

    def _step(self, decodes: List[Chunk]) -> StepBudget:
        return StepBudget(self.plan, self.page_size, self.predictor, self.chunking.tokens, decodes)

    def _ramp(self, decodes: int) -> int:
        """Rows that the next batch may have: one bucket more than those in later stages, which pay for it too."""
        most = max(decodes, *self._recent, 0)
        if not most or self.plan.stage == 1:
            return self._buckets[-1]
        at = self._bucket(most) + (self._grown <= -self.plan.stage)
        return self._buckets[min(at, len(self._buckets) - 1)]

    def _bucket(self, rows: int) -> int:
        return min(bisect_left(self._buckets, rows), len(self._buckets) - 1) if rows else -1

    def _time(self, decodes: List[Chunk]) -> float:
        """Seconds that a step may take."""
        if not self.chunking.adaptive:
            return math.inf
        targets = [s.tpot_target for s, *_ in decodes if s.tpot_target is not None]
        return min(targets, default=math.inf) / self.plan.stage

    def _smallest(self, start: int, efficient: float) -> int:
        """The smallest chunk after `start` tokens that reaches such a share of the best one's speed, read alone."""
        seconds = [self.predictor.seconds(Work().with_chunk(start, size, False)) for size in self._sizes]
        least = min(time / size for size, time in zip(self._sizes, seconds, strict=True))
        return next(size for size, time in zip(self._sizes, seconds, strict=True) if efficient * time <= least * size)

    def _lend(
        self, step: StepBudget, head: Sequence, others: List[Sequence], now: float
    ) -> tuple[float, list[Sequence]]:
        """The share of the step that the most urgent prompt lends, and to whom: to those that need less than it."""
        borrowers = [s for s in others if s.prefill_remaining < head.prefill_remaining and s.priority == head.priority]
        if self.plan.context > 1:
            ranks = {*step.ranks(head)}
            borrowers = [s for s in borrowers if not ranks.isdisjoint(step.ranks(s))]
        return min(1.0, max((self.policy.share(s, now) for s in borrowers), default=0.0)), borrowers
