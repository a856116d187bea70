"""How long prompts will take, and when their first tokens are due."""

import itertools
from collections.abc import Iterable

from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.scheduler.prompt_time import PromptTime
from longctx.serving.scheduler.sequence import Sequence, State
from longctx.serving.scheduler.slo import Slo

# A change of the predictor's correction for which the predictions of all prompts are corrected.
_NOTABLE = 0.05
# A prompt's rest is predicted as a whole whenever this share of it has been computed: one part of so many.
_PARTS = 16


class Forecast:
    """Predicts prompts by the engine's predictor.

    Args:
      time: predicts what runs alone; its predictor is `predictor`.
    """

    def __init__(self, predictor: Corrected, time: PromptTime, plan: ParallelPlan, slo: Slo) -> None:
        self._predictor, self.time, self._slo = predictor, time, slo
        self._num_stages, self._num_ranks = plan.stage, plan.context
        self._factor = predictor.prompt_factor

    @property
    def factor(self) -> float:
        """The correction that prompts were predicted with last."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._factor = factor

    def is_sharded(self, sequence: Sequence) -> bool:
        """Whether the next rows of a sequence are sharded over all context ranks."""
        if sequence.state is State.DECODING:
            return self.time.rule.shards_decodes()
        return self.time.rule.shards_next(sequence)

    def prefill_seconds(self, start: int, stop: int, tpot: float | None = None) -> float:
        """Seconds of a prompt's tokens from `start` to `stop`, computed alone, see `PromptTime`."""
        return self.time.prefill_seconds(start, stop, tpot)

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
                alone = self.prefill_seconds(0, sequence.prompt_length, sequence.tpot_target)
            ttft = self._slo.ttft(alone)
        sequence.deadline, sequence.ttft_budget = sequence.arrival + ttft, ttft

    def update(self, sequence: Sequence) -> None:
        """Predict the rest of its prompt."""
        sequence.predicted_at = start = min(max(sequence.computed, sequence.prefix_hit_tokens), sequence.length - 1)
        sequence.prefill_remaining = self.prefill_seconds(start, sequence.length, sequence.tpot_target)

    def advance(self, sequence: Sequence, count: int) -> None:
        """Predict the rest of its prompt, of which `count` tokens have just been planned.

        What they take is subtracted; from time to time, the rest is predicted as a whole.
        """
        if _PARTS * (sequence.computed - sequence.predicted_at) > sequence.remaining:
            self.update(sequence)
        else:
            start, stop = sequence.computed - count, sequence.length
            sequence.prefill_remaining -= self.time.step_seconds(start, count, stop, sequence.tpot_target)

    def rank_load(self, prompts: Iterable[Sequence]) -> list[float]:
        """Seconds of prompts that each rank has to compute: of the rest of each, on all ranks that compute it next."""
        load = [0.0] * self._num_ranks
        for sequence in prompts:
            assert sequence.placement is not None
            ranks = sequence.ranks or (sequence.placement.rank(0),)
            if self.is_sharded(sequence):
                ranks = tuple(range(self._num_ranks))
            for rank in ranks:
                load[rank] += sequence.prefill_remaining
        return load

    def heed_correction(self, *queues: Iterable[Sequence]) -> None:
        """Correct the predictions of all prompts where the device turns out to be slower or faster than predicted.

        Deadlines stay: what was promised is what is measured.
        """
        factor = self._predictor.prompt_factor
        if abs(factor / self._factor - 1) > _NOTABLE:
            # Steps of prompts are predicted in proportion to it, but a last one of a single token; to predict them anew
            # would take many milliseconds. What was predicted since its last notable change is off by that little.
            for sequence in itertools.chain(*queues):
                sequence.prefill_remaining *= factor / self._factor
            self._factor = factor
