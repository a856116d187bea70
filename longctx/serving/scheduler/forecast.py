"""Predicted seconds of prompts computed alone, by the ranks they grow onto, and deadlines of first tokens."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from longctx.serving.kv_cache.placement import Placer
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.runtime import Predictor, curves_of, seconds_of_many
from longctx.serving.predictor.work import Work
from longctx.serving.request.request import Request
from longctx.serving.scheduler.exchange_rule import ExchangeRule
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.slo import Slo

# Steps that are predicted one by one; places at which the steps of a longer prompt are looked at; and, where ranks
# fill up, rounds of all ranks.
_LOOKED_AT, _PARTS, _FOLLOWED = 16, 4, 2

_NO_WORK = Work()


@dataclass(frozen=True)
class PromptTime:
    """Predicts what a sequence takes that has the engine to itself.

    A step takes as long as its slowest rank. That is the one with most of the sequence's keys, where rows are
    replicated; where rows are sharded, all ranks have as many, but the keys of the fullest go round.

    Attributes:
      placer: says how pages spread over ranks.
      rows: of a step on one rank, at most.
      rank_tokens: tokens of which a rank has pages.

    Source: Mnemosyne, 4.4, whose figure 10 and section 6.4 have the time of a step while requests grow.
    """

    predictor: Predictor
    rule: ExchangeRule
    placer: Placer
    rows: int
    page_size: int
    rank_tokens: int

    def prefill_seconds(self, start: int, stop: int, tpot: float | None = None) -> float:
        """Seconds of a prompt's tokens from `start` to `stop`; `tpot`: the TPOT target, which its limit follows."""
        limit = self._limit(tpot)
        if stop <= start:
            return 0.0
        if not self._is_spread(stop, limit) and not self.rule.shards(start, stop):
            return self.predictor.prefill_seconds(start, stop, self.rows)
        total, chunk = 0.0, self._step(start, stop, limit)[0]
        whole = stop - (stop - start - 1) % chunk - 1  # full steps until here, if they stay alike
        if whole - start > _LOOKED_AT * chunk:
            for end in self._edges(start, whole, limit):
                # Between two edges, the seconds of a step are about linear in its context.
                (tokens, first), last = self._step(start, stop, limit), max(start, end - chunk)
                at_end, seconds = self._step(last, stop, limit)
                total += (end - start) * (first / tokens + seconds / at_end) / 2
                start = end
        while start < stop:
            tokens, seconds = self._step(start, stop, limit)
            start, total = start + tokens, total + seconds
        return total

    def step_seconds(self, start: int, count: int, stop: int, tpot: float | None = None) -> float:
        """Seconds of `count` tokens after `start` others of a prompt that ends at `stop`, as a part of a full step."""
        if self.placer.num_ranks == 1:  # at once, for there are many
            tokens, none = min(stop - start, self.rows), Work(window=self.rule.window) if self.rule.window else _NO_WORK
            if start + tokens == stop:
                seconds = self.predictor.seconds(none.with_chunk(start, tokens, True))
            else:
                seconds = curves_of(self.predictor)(none, start)(tokens)
        else:
            tokens, seconds = self._step(start, stop, self._limit(tpot))
        return seconds * count / tokens

    def next_step(self, start: int, stop: int, tpot: float | None = None) -> tuple[int, float]:
        """The tokens of the next full step of a prompt that ends at `stop`, from `start` on, and its seconds."""
        return self._step(start, stop, self._limit(tpot))

    def decode_seconds(self, context: int, tpot: float | None = None) -> float:
        """Seconds of one token after `context` others, in one stage."""
        limit, ranks, none = self._limit(tpot), self.placer.num_ranks, Work(window=self.rule.window)
        fullest = max(self._keys(context + 1, limit))
        if ranks > 1 and self.rule.shards_decodes():
            return self.predictor.seconds(none.with_sharded(context, 1, ranks, samples=True, exchange="pass_q"))
        work = none.with_chunk(fullest - 1, 1, True, self._is_spread(context + 1, limit), self.rule.rank_window)
        return self.predictor.seconds(work._replace(elsewhere=context + 1 - fullest))

    def check_targets(self, request: Request, cached: int, length: int, stages: int) -> None:
        """ValueError if what a request asks for can't be met by an engine that does nothing else.

        Its prompt has `length` tokens, of which the cache has the first `cached`. A token takes a step in each stage.
        """
        if request.ttft_deadline is not None:
            least = self.prefill_seconds(min(cached, length - 1), length, request.tpot_target)
            if least > request.ttft_deadline:
                raise ValueError(
                    f"ttft_deadline={request.ttft_deadline} can't be met: {length - cached:,} tokens take "
                    f"{least:.3g} s even alone, by the engine's profile"
                )
        if request.tpot_target is not None:
            last = length + request.sampling.max_tokens - 2  # tokens before the last one that is computed
            least = stages * self.decode_seconds(last, request.tpot_target)
            if least > request.tpot_target:
                raise ValueError(
                    f"tpot_target={request.tpot_target} can't be met: a token after {last:,} others takes "
                    f"{least:.3g} s even alone, by the engine's profile"
                )

    def _step(self, start: int, stop: int, limit: float) -> tuple[int, float]:
        """The tokens of the next step of a prompt that ends at `stop`, and its seconds."""
        ranks, keys, none = self.placer.num_ranks, self._keys(start, limit), Work(window=self.rule.window)
        fullest = max(keys)
        if ranks > 1 and self.rule.shards(start, stop, keys if start else None):
            count = min(stop - start, ranks * self.rows)
            cached, samples = fullest if count > 1 else 0, start + count == stop
            works = (
                none.with_sharded(start, count, ranks, cached, samples, name)
                for name in self.rule.exchanges(count, start)
            )
            seconds = (self.predictor.seconds(work._replace(elsewhere=(ranks - 1) * work.pairs)) for work in works)
            return count, min(seconds)
        count = min(stop - start, self.rows)
        if not self._is_spread(start + count, limit):
            return count, self.predictor.seconds(none.with_chunk(start, count, start + count == stop))
        # On the fullest rank there are few of the chunk's own keys, or none, if it grows on another one.
        grows = max(self._keys(start + count, limit)) - fullest
        here = max(0, fullest + (grows - count) // 2)
        work = none.with_chunk(here, count, start + count == stop, True, self.rule.rank_window)
        rest = count * start + count * (count + 1) // 2 - work.pairs
        return count, self.predictor.seconds(work._replace(elsewhere=max(0, rest)))

    def _is_spread(self, tokens: int, limit: float) -> bool:
        """Return whether a sequence of `tokens` tokens is on several ranks."""
        return self.placer.num_ranks > 1 and (tokens > limit or not self.placer.grows)

    def _limit(self, tpot: float | None) -> float:
        """Tokens of a sequence that a rank has at most, if others have room."""
        pages = min(self.placer.limit(tpot) * self.page_size, self.rank_tokens)
        return pages if self.placer.grows else math.inf

    def _keys(self, tokens: int, limit: float) -> list[int]:
        """Return how many of a sequence's first tokens each rank has."""
        ranks = self.placer.num_ranks
        if ranks == 1:
            return [tokens]
        if not self.placer.grows:
            return [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]
        rounds, rest = divmod(tokens, ranks * limit)
        return [int(rounds * limit + min(max(0, rest - rank * limit), limit)) for rank in range(ranks)]

    def _edges(self, start: int, stop: int, limit: float) -> list[int]:
        """Return where steps change: the fullest rank begins or ceases to get more, or a window is full; and `stop`."""
        ranks = self.placer.num_ranks
        edges = {start + (stop - start) * i // _PARTS for i in range(1, _PARTS + 1)}
        if limit < math.inf:
            rounds = start // (ranks * limit)
            edges |= {int((rounds + i) * ranks * limit + part) for i in range(_FOLLOWED) for part in (0, limit)}
        edges.add(self.rule.window)
        return sorted(edge for edge in edges if start < edge <= stop)


# A change of the predictor's correction for which the predictions of all prompts are corrected.
_NOTABLE = 0.05
# A prompt's rest is predicted as a whole each time one part of this many has been computed.
_PARTS = 16


class Forecast:
    """Predicts prompts by the engine's predictor.

    Args:
      time: predicts what runs alone; its predictor is `predictor`.

    Attributes:
      factor: the correction that prompts were predicted with last.
    """

    def __init__(self, predictor: Corrected, time: PromptTime, plan: ParallelPlan, slo: Slo) -> None:
        self._predictor, self.time, self._slo = predictor, time, slo
        self._num_stages, self._num_ranks = plan.stage, plan.context
        self.factor = predictor.prompt_factor

    def promise(self, sequence: Sequence) -> None:
        """Predict a prompt that comes; set when its first token is due, and how long each later one may take: once."""
        if sequence.tpot_target is None and self._slo.tpot is not None:
            alone = self.time.decode_seconds(sequence.prompt_length, self._slo.tpot)
            sequence.tpot_target = self._slo.tpot_target(self._num_stages * alone)
        self.update(sequence)
        ttft = sequence.ttft_deadline
        if ttft is None:
            alone = sequence.prefill_remaining
            if sequence.predicted_at:  # the cache has some of it
                alone = self.time.prefill_seconds(0, sequence.prompt_length, sequence.tpot_target)
            ttft = self._slo.ttft(alone)
        sequence.deadline, sequence.ttft_budget = sequence.arrival + ttft, ttft

    def update(self, sequence: Sequence) -> None:
        """Predict the rest of its prompt."""
        sequence.predicted_at = start = min(max(sequence.computed, sequence.prefix_hit_tokens), sequence.length - 1)
        sequence.prefill_remaining = self.time.prefill_seconds(start, sequence.length, sequence.tpot_target)

    def advance(self, sequence: Sequence, count: int) -> None:
        """Predict the rest of its prompt, of which `count` tokens have just been planned.

        What they take is subtracted; from time to time, the rest is predicted as a whole.
        """
        if _PARTS * (sequence.computed - sequence.predicted_at) > sequence.remaining:
            self.update(sequence)
        else:
            start, stop = sequence.computed - count, sequence.length
            sequence.prefill_remaining -= self.time.step_seconds(start, count, stop, sequence.tpot_target)

    def advance_many(self, sequence: Sequence, tokens: np.ndarray) -> tuple[list[float], list[int]]:
        """Predict the rest of a prompt after each of many steps, each time as `advance` does.

        Args:
          sequence: that has the first of the steps' tokens next; on one rank.
          tokens: of each step, int64 `[steps]`; after the last, more than a step's are left.

        Returns:
          `prefill_remaining` and `predicted_at` after each step.
        """
        begin, length, rows = sequence.computed, sequence.length, self.time.rows
        ends = begin + np.cumsum(tokens)
        works = Work.of_many(0, 0, ends - tokens, rows)
        taken = seconds_of_many(self._predictor, works, len(tokens)) * tokens / rows
        rest, predicted, at = list[float](), list[int](), 0
        while at < len(tokens):
            # As many as are subtracted before the rest is predicted as a whole.
            later = _PARTS * (ends[at:] - sequence.predicted_at) > length - ends[at:]
            count = int(later.argmax()) if later.any() else len(later)
            run = np.concatenate([[sequence.prefill_remaining], taken[at : at + count]])
            rest += np.subtract.accumulate(run)[1:].tolist()
            predicted += [sequence.predicted_at] * count
            at += count
            sequence.prefill_remaining = rest[-1] if rest else sequence.prefill_remaining
            if at < len(tokens):
                sequence.computed = int(ends[at])
                self.update(sequence)
                rest.append(sequence.prefill_remaining)
                predicted.append(sequence.predicted_at)
                at += 1
        sequence.computed = int(ends[-1])
        return rest, predicted

    def rank_load(self, prompts: Iterable[Sequence]) -> list[float]:
        """Seconds of prompts that each rank has to compute: of the rest of each, on all ranks that compute it next."""
        load = [0.0] * self._num_ranks
        for sequence in prompts:
            assert sequence.placement is not None
            ranks = sequence.ranks or (sequence.placement.rank(0),)
            if self.time.rule.shards_next(sequence):
                ranks = tuple(range(self._num_ranks))
            for rank in ranks:
                load[rank] += sequence.prefill_remaining
        return load

    def rescale_predictions(self, *queues: Iterable[Sequence]) -> None:
        """Correct the predictions of all prompts where the device turns out to be slower or faster than predicted.

        Deadlines stay: what was promised is what is measured.
        """
        factor = self._predictor.prompt_factor
        if abs(factor / self.factor - 1) > _NOTABLE:
            # Steps of prompts are predicted in proportion to it, but a last one of a single token; to predict them anew
            # would take many milliseconds. What was predicted since its last notable change is off by that little.
            for sequence in itertools.chain(*queues):
                sequence.prefill_remaining *= factor / self.factor
            self.factor = factor
