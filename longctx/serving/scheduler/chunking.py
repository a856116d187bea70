"""Rows of a step for each prompt: chunk sizes, and prompts that share a step."""

import functools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np

from longctx.models.validation import shown
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.runtime import Predictor, curves_of, readable_tokens, window_of
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Chunk, work_by_rank
from longctx.serving.scheduler.exchange_rule import ExchangeRule, count_rows
from longctx.serving.scheduler.local_budget import LocalBudget
from longctx.serving.scheduler.policy import Policy, TenantShares, by_urgency, lends_steps
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.step_budget import Share, StepBudget

Budget = StepBudget | LocalBudget

# Shares of the tokens per second of the best chunk: below the first a chunk is a waste, whatever decodes were promised;
# below the second, the prompt loses more than those gain that may come meanwhile; above the last a larger one gains
# nothing, but keeps them waiting.
EFFICIENT, _GOOD, _BEST = 0.5, 0.9, 0.95


class Chunking(NamedTuple):
    """`static`: `tokens` rows in every step (Sarathi). `adaptive`: up to `tokens`, as many as keep the decodes' TPOT.

    Source: Medha, 3.2; Mnemosyne, 4.2.
    """

    adaptive: bool
    tokens: int

    @classmethod
    def parse(cls, text: str, token_budget: int, max_running: int) -> "Chunking":
        """From `"adaptive"`, `"static"` or `"static:N"`.

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


def limit_of_rank(predictor: Predictor, chunking: Chunking, tpot: float | None, stages: int, most: int) -> float:
    """The longest context of a rank with which decodes keep a TPOT target beside the chunks that run: tokens.

    Args:
      most: tokens that there may be; the result is infinite if it exceeds them, see `readable_tokens`.
    """
    alone = min(most, readable_tokens(predictor, tpot, stages, most))
    chunk = smallest_chunk(predictor, chunking, int(alone), EFFICIENT) if chunking.adaptive else chunking.tokens
    # The decode is a row of the step too: a profile predicts no more of them.
    return readable_tokens(predictor, tpot, stages, most, min(chunk, chunking.tokens - 1))


@functools.cache
def _chunk_sizes(tokens: int) -> list[int]:
    """Powers of two up to a number of tokens, and this."""
    return sorted({*(1 << i for i in range(tokens.bit_length())), tokens})


def smallest_chunk(predictor: Predictor, chunking: Chunking, start: int, efficient: float) -> int:
    """The smallest chunk after `start` tokens that reaches such a share of the best one's speed, read alone."""
    sizes = _chunk_sizes(chunking.tokens)
    seconds = [*map(curves_of(predictor)(Work(window=window_of(predictor)), start), sizes)]
    least = min([time / size for size, time in zip(sizes, seconds, strict=True)])
    for size, time in zip(sizes, seconds, strict=True):
        if efficient * time <= least * size:
            break
    return size


class Chunker:
    """Fills steps with chunks of prompts.

    With adaptive chunking a step takes the time that the tightest TPOT target of its decodes allows, by prediction; so
    chunks shrink as the context before them grows. They don't shrink below the smallest efficient chunk, whatever the
    target. Without a target a step takes `step_seconds`, as those that come meanwhile wait for it; if it takes longer,
    its chunks are no larger than is of use. Chunks fill the programs that steps are compiled for. With static
    chunking, prompts share tokens.

    Ranks wait for the slowest. So each of them is filled up to the time of the step, not to equal rows, by the most
    urgent prompts that have their pages there (Mnemosyne, 7: KVP instances are scheduled independently for short
    requests). The chunk of a long prompt on some ranks is no longer than what the others can read meanwhile.

    With several stages a token comes after as many steps, and a step takes the largest of the batches in the stages:
    so its time is a share of the target of any of these. Its rows don't grow by more than one bucket in as many steps,
    except to read a prompt to its end.

    Args:
      step_seconds: of steps without decodes that have a target; see `Slo`.
      rule: says whose rows are sharded; None: without predictions.
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
        step_seconds: float = math.inf,
        rule: ExchangeRule | None = None,
    ) -> None:
        self.policy, self.predictor, self.chunking = policy, predictor, chunking
        self.plan, self.page_size = plan or ParallelPlan(), page_size
        self.rule = rule or ExchangeRule(self.plan, chunking.tokens, page_size)
        self.tenants, self.step_seconds = tenants or TenantShares({}), step_seconds
        self._lends = lends_steps(policy)
        self._buckets = [*buckets] or [chunking.tokens]
        self._recent: deque[int] = deque(maxlen=self.plan.stage - 1)  # rows of the batches in later stages
        self._grown = -self.plan.stage  # how many batches ago rows grew

    def pack(
        self, prompts: List[Sequence], decodes: List[Chunk], now: float, in_stages: List[Sequence] = ()
    ) -> dict[Sequence, Share]:
        """The share of each prompt that gets one, beside the decodes.

        Args:
          in_stages: sequences whose decodes are in later stages, and wait for this step too.
        """
        if not prompts:
            return {}
        step: Budget
        if self.plan.context == 1:
            (work,) = work_by_rank(decodes, 1, self.page_size, window=self.rule.window)
            step = self.step(work)
        else:
            step = StepBudget(self.plan, self.page_size, self.predictor, self.chunking.tokens, decodes, self.rule)
        return self.fill(step, prompts, now, lambda head: self._targets(step, head, decodes, in_stages))

    def step(self, work: Work) -> LocalBudget:
        """Return a step on one rank that has decodes alone, which are such work."""
        return LocalBudget(self.predictor, self.chunking.tokens, work)

    def fill(
        self, step: Budget, prompts: List[Sequence], now: float, targets_of: Callable[[Sequence], List[float]]
    ) -> dict[Sequence, Share]:
        """Fill a step with chunks of prompts, at least one, and return the share of each that gets one.

        Args:
          targets_of: the TPOT targets that bound a step whose most urgent prompt is given.
        """
        order = by_urgency(self.policy, prompts, now, self.tenants)
        head = next(order)
        if head.remaining > step.room(head):  # else rows do not stay as many
            step.tokens = min(step.tokens, max(self._ramp(step.rows), step.rows))
        if step.tokens <= step.rows:
            return {}
        # Where each has a step to itself, only those are looked at for whom it leaves something.
        others = [*order] if self._lends or self.plan.context > 1 else []
        targets = targets_of(head) if self.heeds_targets else []
        least_of = self._set_limit(step, head, others, targets)
        self._take(step, head, others, least_of, now)
        if isinstance(step, StepBudget):
            if step.limit == math.inf:
                step.limit = step.full_seconds()
            step.limit = max(step.limit, step.seconds)  # that long all ranks wait
        elif not step.has_all(head):
            return step.shares
        for number, other in enumerate(others or order, 1):
            if other in step.shares or step.take_whole(other):
                continue
            self._take(step, other, others[number:], None, now)
            if step.is_full or (self.plan.context == 1 and not step.has_all(other)):
                break
        return step.shares

    def keeps_rows(
        self, rows: int, decodes: int, targets: List[float], seconds_of: Callable[[int], np.ndarray], count: int
    ) -> np.ndarray:
        """Return in which of many steps the only prompt gets as many rows as before, bool `[count]`, as by `fill`.

        The prompt has more tokens left than a step, and pages on one rank.

        Args:
          rows: of each step, decodes included.
          targets: the least TPOT target of the decodes that wait for the steps; empty: none has one.
          seconds_of: seconds of the steps with a chunk of some tokens, float64 `[count]`; of none: without the prompt.
          count: of steps.
        """
        most, none = self.chunking.tokens, np.zeros(count, bool)
        if self.plan.stage > 1:
            if {*self._recent} != {rows} or (rows < most and self._grown > -self.plan.stage):
                return none
            most = min(most, self._ramp(decodes))
        elif self._buckets[-1] < most:
            return none
        fewer = self._smaller_program(most) if self.chunking.adaptive else 0
        if rows not in (most, fewer) or min(rows, most) < decodes + 2:
            return none
        if not self.chunking.adaptive:
            return ~none
        limit = (targets[0] if targets else self.step_seconds) / self.plan.stage
        if limit == math.inf or fewer == decodes + 1:
            return none
        alone, all_seconds = seconds_of(0), seconds_of(most - decodes)
        fits = np.maximum(alone, all_seconds) <= limit  # else a smaller chunk is searched for
        if fewer <= decodes:
            return fits
        smaller, larger = np.maximum(alone, seconds_of(fewer - decodes)), np.maximum(alone, all_seconds)
        is_fewer = (most - decodes) * smaller < (fewer - decodes) * larger
        return fits & (is_fewer if rows == fewer else ~is_fewer)

    @property
    def heeds_targets(self) -> bool:
        """Whether some steps are as long as the TPOT targets of decodes allow; else those need not be known."""
        return self.chunking.adaptive or self.plan.context > 1

    def token_seconds(self, decoding: List[Sequence]) -> float:
        """Predict the seconds between two tokens of sequences that decode beside prompts."""
        ranks, window, computed = self.plan.context, self.rule.window, [sequence.computed for sequence in decoding]
        decodes = Work(len(computed), len(computed), sum(computed) // ranks, window=window)
        if window:
            decodes = decodes._replace(window_decode_keys=sum([min(each, window) for each in computed]) // ranks)
        if self.chunking.adaptive:
            targets = [sequence.tpot_target for sequence in decoding if sequence.tpot_target is not None]
            limit = min(targets, default=self.step_seconds)
            if limit < math.inf:
                return max(limit, self.plan.stage * self.predictor.seconds(decodes))
        chunk = decodes.with_chunk(0, max(1, self.chunking.tokens - len(computed)), False)
        return self.plan.stage * self.predictor.seconds(chunk)

    def note(self, chunks: List[Chunk]) -> None:
        """Remember the rows of a batch that has been planned; it may be empty."""
        if self.plan.stage > 1:
            self.note_rows(sum(count_rows(chunks, self.plan.context)))

    def note_rows(self, rows: int) -> None:
        """Remember the rows of a batch, see `note`."""
        if self.plan.stage > 1:
            grows = self._bucket(rows) > self._bucket(max(self._recent, default=0))
            self._grown = -1 if grows else self._grown - 1
            self._recent.append(rows)

    @property
    def history(self) -> tuple[tuple[int, ...], int]:
        """State that is remembered of the batches before, which can be set again."""
        return tuple(self._recent), self._grown

    @history.setter
    def history(self, history: tuple[tuple[int, ...], int]) -> None:
        self._recent = deque(history[0], self._recent.maxlen)
        self._grown = history[1]

    def advance(self, steps: int, batches: Iterable[List[Chunk]]) -> None:
        """Advance as if steps with as many rows as those before had been planned; `batches`: the last, one a stage."""
        if self.plan.stage > 1:
            self._grown -= steps - self.plan.stage
        for chunks in batches:
            self.note(chunks)

    def _ramp(self, decodes: int) -> int:
        """Rows that the next batch may have: one bucket more than those in later stages, which pay for it too."""
        most = max(decodes, *self._recent, 0)
        if not most or self.plan.stage == 1:
            return self._buckets[-1]
        at = self._bucket(most) + (self._grown <= -self.plan.stage)
        return self._buckets[min(at, len(self._buckets) - 1)]

    def _bucket(self, rows: int) -> int:
        return min(bisect_left(self._buckets, rows), len(self._buckets) - 1) if rows else -1

    def _targets(self, step: Budget, head: Sequence, decodes: List[Chunk], in_stages: List[Sequence]) -> list[float]:
        """Return the TPOT targets that bound a step: with static chunks, those of decodes on other ranks only."""
        waiting = [(chunk.sequence, chunk.ranks) for chunk in decodes] + [(s, s.ranks) for s in in_stages]
        if not self.chunking.adaptive:
            ranks = {*step.ranks(head)} if isinstance(step, StepBudget) else {0}
            waiting = [(sequence, others) for sequence, others in waiting if ranks.isdisjoint(others)]
        return [sequence.tpot_target for sequence, _ in waiting if sequence.tpot_target is not None]

    def _set_limit(
        self, step: Budget, head: Sequence, others: List[Sequence], targets: List[float]
    ) -> Callable[[], int]:
        """Set the seconds that a step may take. Returns what finds the smallest chunk of the most urgent prompt.

        Where other ranks have prompts too, and wait, it is no more than these can use: what all rows take without
        context, or a chunk of the most urgent prompt that is still good. Static chunks too leave decodes of other ranks
        their targets.
        """
        has_others = isinstance(step, StepBudget) and step.has_others(head, others)
        context, spread, efficient = step.context(head), step.spread(head), 0.0
        if targets:
            step.limit, efficient = min(targets) / self.plan.stage, EFFICIENT
        elif self.chunking.adaptive:
            step.limit, efficient = self.step_seconds / self.plan.stage, _GOOD
            if not step.seconds_with(head, step.room(head)) <= step.limit < math.inf:
                best = self._smallest(0 if has_others else context, _BEST)
                step.tokens = min(best + step.rows, step.tokens)
        if isinstance(step, StepBudget) and has_others:
            good = min(self._smallest(context, _GOOD) * spread, step.room(head))
            step.limit = min(step.limit, max(step.full_seconds(), step.seconds_with(head, good)))
        return lambda: self._smallest(context, efficient) * spread if efficient else 1

    def _take(
        self,
        step: Budget,
        sequence: Sequence,
        others: List[Sequence],
        least_of: Callable[[], int] | None,
        now: float,
    ) -> None:
        """Give a prompt the room that its ranks have, or the least, but for what it lends to less urgent ones.

        Args:
          least_of: finds the least that it gets, which takes long; None: it may get nothing.
        """
        room = step.room(sequence)
        if (least_of is None or not room) and not step.has_room(sequence):
            return
        least = -1  # not known yet
        borrowers = self._borrowers(step, sequence, others) if others and self._lends else []
        if borrowers:
            least = 0 if least_of is None else min(least_of(), room)
            self._find_due_shares(step, sequence, borrowers, least, now)
        lent = min(1.0, max([self.policy.share(s, now) for s in borrowers], default=0.0))
        if lent > 0:
            # Beside what the prompt keeps. It may end within that: then it lends nothing, and they get what is left.
            beside = step.beside(sequence, max(least, step.largest(sequence, 1 - lent)))
            # The shortest first: a long one among them would take all of what is lent to short ones.
            beside.fill(sorted(borrowers, key=lambda s: (s.prefill_remaining, s.order)))
            for borrower, share in beside.shares.items():
                step.take_share(borrower, share)
        count, left = step.largest(sequence), step.room(sequence)
        if count < left and least_of is not None:
            least = min(least_of(), room) if least < 0 else least
            count = max(min(least, left), count)
        step.take(sequence, self._fill_program(step, sequence, count) if self.chunking.adaptive else count)

    def _fill_program(self, step: Budget, sequence: Sequence, count: int) -> int:
        """`count` tokens of a prompt, or fewer that fill a smaller program, if that takes less time for each token.

        The last chunk of a prompt stays whole. On several ranks programs have rows of three kinds, which are not
        filled.
        """
        fewer = self._smaller_program(step.rows + count) - step.rows
        if self.plan.context > 1 or not 0 < fewer < count or count == sequence.remaining:
            return count
        smaller, larger = step.seconds_with(sequence, fewer), step.seconds_with(sequence, count)
        return fewer if count * smaller < fewer * larger else count

    def _smaller_program(self, rows: int) -> int:
        """Return the largest number of rows below these that steps are compiled for; 0 if there is none."""
        at = bisect_left(self._buckets, rows)
        return self._buckets[at - 1] if at else 0

    def _smallest(self, start: int, efficient: float) -> int:
        return smallest_chunk(self.predictor, self.chunking, start, efficient)

    def _borrowers(self, step: Budget, head: Sequence, others: List[Sequence]) -> list[Sequence]:
        """Return the prompts that may share the ranks of a prompt: those that need less than it does."""
        borrowers = [
            s
            for s in others
            if s.prefill_remaining < head.prefill_remaining and s.priority == head.priority and s not in step.shares
        ]
        if isinstance(step, StepBudget):
            ranks = {*step.ranks(head)}
            borrowers = [s for s in borrowers if not ranks.isdisjoint(step.ranks(s))]
        return borrowers

    def _find_due_shares(self, step: Budget, head: Sequence, borrowers: List[Sequence], least: int, now: float) -> None:
        """Set `due_share` of those that may share the steps of a longer prompt.

        It is what they and those that are due before them need of the steps until then, each as long as this one with
        the longer prompt's chunk alone: of the rows, and of the seconds where these are limited. The first token comes
        from the last stage, and after the step that runs now.
        """
        rows, free = step.free_rows, step.free_seconds
        most = min(step.room(head), rows * step.spread(head))
        seconds = max(step.seconds_with(head, least), min(step.limit, step.seconds_with(head, most)))
        tokens = work = 0.0
        for sequence in sorted(borrowers, key=lambda s: (s.deadline, s.order)):
            left = max(0.0, sequence.deadline - now)
            steps = max(1.0, left // seconds - self.plan.stage) if seconds > 0 else math.inf
            tokens += sequence.remaining / step.spread(sequence)
            work += sequence.prefill_remaining
            sequence.due_share = max(tokens / rows, work / free) / steps if free > 0 else 1.0
