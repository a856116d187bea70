"""Times of one long prompt on a plan, chunk by chunk, while another request decodes; by arithmetic.

The chunks are those that the scheduler gives: as large as keeps the decodes' TPOT, but no smaller than is efficient.

Source: Mnemosyne, 4.2 (adaptive chunks), 4.3 (a token takes a step in each stage) and 4.4 (growth over ranks).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from longctx.serving.scheduler.chunking import EFFICIENT, Chunking, limit_of_rank, smallest_chunk
from longctx.serving.scheduler.exchange_rule import ExchangeRule
from longctx.serving.scheduler.forecast import PromptTime
from longctx.simulation.deployment import Deployment
from longctx.simulation.record import Record
from longctx.simulation.workloads import WorkloadRequest

POSITIONS = 32  # in which steps of a long prompt are looked at; between two of them, seconds per token are about linear


class Prompt(NamedTuple):
    """Latencies and chunks of a long prompt, as `evaluate` predicts them.

    Attributes:
      ttft: seconds to the first token.
      tpot: seconds of a token of its own, after the prompt.
      beside: seconds of a token of another request while the prompt is prefilled: at worst as predicted, on average as
        simulated.
      smallest, largest: chunks, tokens.
      steps: of the prompt.

    Examples:
      >>> from longctx.simulation.planner.prompt import Prompt
      >>> prompt = Prompt(ttft=70.4, tpot=0.01, beside=0.03, smallest=500, largest=4096, steps=900)
      >>> round(prompt.steps / prompt.ttft)  # steps a second
      13
    """

    ttft: float
    tpot: float
    beside: float
    smallest: int
    largest: int
    steps: int


class PromptPredictor:
    """Predicts a prompt on an instance of a deployment, in steps as full as chunking allows."""

    def __init__(self, deployment: Deployment) -> None:
        config, plan, predictor = deployment.config, deployment.plan, deployment.predictor()
        chunking = Chunking.parse(config.chunking, config.token_budget, config.max_running)
        most = config.longest_sequence(deployment.model.max_positions)
        placer = plan.placer(
            config.page_size,
            config.token_budget,
            lambda tpot: limit_of_rank(predictor, chunking, tpot, plan.stage, most),
        )
        link, buckets = getattr(predictor, "exchange", None), config.sharded_buckets
        self._window = window = deployment.model.sliding_window or 0
        rule = ExchangeRule(plan, chunking.tokens, config.page_size, predictor, link, buckets=buckets, window=window)
        rank_tokens = deployment.num_pages * config.page_size
        self.deployment = deployment
        self._plan, self._predictor, self._chunking = plan, predictor, chunking
        self._time = PromptTime(predictor, rule, placer, chunking.tokens, config.page_size, rank_tokens)

    def predict(self, length: int, output_tokens: int = 1) -> Prompt:
        """Predict a prompt of `length` tokens, whose last output token comes after `output_tokens - 1` more."""
        stages = self._plan.stage
        tpot = self.deployment.config.slo.per_token(stages).tpot
        places = [length * at // POSITIONS for at in range(POSITIONS)] + [length]
        if 0 < self._window < length:
            places = sorted({*places, self._window})  # from where on layers with a window take no longer
        # Steps are looked at as if the prompt went on, so that the last one is full too.
        most = length + self._chunking.tokens * self._plan.context
        steps = [self._step(place, most, tpot) for place in places]
        ttft = _integral(places, [seconds / tokens for tokens, seconds in steps])
        # The last chunk goes on through the other stages; the first token comes after that.
        ttft += (stages - 1) * steps[-1][1]
        decode = stages * self._time.decode_seconds(length + output_tokens - 1, tpot)
        chunks = [tokens for tokens, _ in steps]
        # As seconds: between two places the steps for a token are about linear.
        count = sum(
            (places[at + 1] - places[at]) * (1 / chunks[at] + 1 / chunks[at + 1]) / 2 for at in range(len(places) - 1)
        )
        beside = stages * max(seconds for _, seconds in steps)
        return Prompt(ttft, decode, beside, min(chunks), max(chunks), math.ceil(count) + stages - 1)

    def _step(self, start: int, stop: int, tpot: float | None) -> tuple[int, float]:
        """Return the tokens and the seconds of the step at a position."""
        tokens, seconds = self._time.next_step(start, stop, tpot)
        if not self._chunking.adaptive or tpot is None or seconds <= tpot / self._plan.stage:
            return tokens, seconds
        limit, spread = tpot / self._plan.stage, -(-tokens // self._chunking.tokens)
        least = smallest_chunk(self._predictor, self._chunking, self._context(start, spread, tpot), EFFICIENT)
        low, high = 0, self._chunking.tokens  # high is too slow
        while high - low > 1:
            rows = (low + high) // 2
            low, high = (rows, high) if self._with_rows(rows).next_step(start, stop, tpot)[1] <= limit else (low, rows)
        return self._with_rows(max(low, least)).next_step(start, stop, tpot)

    def _with_rows(self, rows: int) -> PromptTime:
        return dataclasses.replace(self._time, rows=rows)

    def _context(self, start: int, spread: int, tpot: float | None) -> int:
        """Tokens before a chunk on the rank that has most of them, or all of them where rows are sharded."""
        ranks = self._plan.context
        if ranks == 1 or spread > 1:
            return start
        if self._plan.placement == "interleave":
            return -(-start // ranks)
        page_size = self.deployment.config.page_size
        limit = min(self._time.placer.limit(tpot) * page_size, self._time.rank_tokens)
        return int(min(start, limit * max(1, -(-start // (ranks * limit)))))


def _integral(places: list[int], values: list[float]) -> float:
    """Integrate what is linear between places."""
    parts = zip(places, places[1:], values, values[1:], strict=False)
    return sum((stop - start) * (one + other) / 2 for start, stop, one, other in parts)


def simulate_prompt(
    deployment: Deployment,
    length: int,
    output_tokens: int,
    steps: int,
    progress: Callable[[Record], object] | None = None,
) -> Prompt:
    """Run such a prompt on the serving core in virtual time, beside a request that decodes all the while.

    Args:
      steps: of the prompt, about.
      progress: is called after every event.
    """
    alone = dataclasses.replace(deployment, instances=1)
    others = max(2, steps // deployment.plan.stage)
    requests = [WorkloadRequest(0.0, 1, others), WorkloadRequest(0.0, length, output_tokens, number=1)]
    record = alone.simulation().run(requests, progress=progress)
    other, long = sorted(record.served, key=lambda served: served.number)
    chunks = [count for step in record.steps for _, count in step.chunks if count > 1]
    return Prompt(
        long.ttft,
        long.tpot or 0.0,
        other.tpot or 0.0,
        min(chunks, default=1),
        max(chunks, default=1),
        sum(bool(step.chunks) for step in record.steps),
    )
