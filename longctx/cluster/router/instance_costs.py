"""`InstanceCosts`: what work costs on an instance, by the predictor that it sends."""

from typing import Any

import msgspec

from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.router.instance_client import NotUnderstood, ServerInfo
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.file import predictor_from_dict
from longctx.serving.validation import check_real

_LEAST, _MOST = 1e-6, 1e6  # of a correction


class InstanceCosts:
    """`Costs` of an instance, which corrects its predictor as its steps run: `update` takes what it says now.

    Raises:
      NotUnderstood: that is no predictor.
    """

    def __init__(self, info: ServerInfo, content: bytes) -> None:
        self._info = info
        self.update(content)

    def update(self, content: bytes) -> None:
        """Take another answer of `/predictor`; NotUnderstood: it is none."""
        try:
            fields: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
            predictor = Corrected(predictor_from_dict(fields["predictor"]))
            predictor.prompt_factor = check_real("prompt_factor", fields["prompt_factor"], _LEAST, _MOST)
            predictor.decode_factor = check_real("decode_factor", fields["decode_factor"], _LEAST, _MOST)
            plan = ParallelPlan(self._info.plan.stage, self._info.plan.context, self._info.plan.tensor)
            self._costs = PredictorCosts(predictor, self._info.token_budget, self._info.kv_bytes_per_token, plan)
            self._costs.decode_seconds(1, 1)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise NotUnderstood(f"its predictor can't be: {type(error).__name__}: {error}") from None

    def prefill_seconds(self, cached: int, prompt: int) -> float:
        """See `Costs`."""
        return self._costs.prefill_seconds(cached, prompt)

    def decode_seconds(self, batch: int, tokens: int) -> float:
        """See `Costs`."""
        return self._costs.decode_seconds(batch, tokens)

    def inline_seconds(self, batch: int, tokens: int, cached: int, prompt: int) -> float:
        """See `Costs`."""
        return self._costs.inline_seconds(batch, tokens, cached, prompt)

    def transfer_bytes(self, tokens: int) -> float:
        """See `Costs`."""
        return self._costs.transfer_bytes(tokens)
