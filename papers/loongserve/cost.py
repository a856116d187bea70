"""Seconds of LoongServe's batches, by the cost model of ours."""

from collections.abc import Iterable

from longctx.models import LlamaConfig, cache_bytes
from longctx.parallel import Topology
from longctx.serving import ParallelPlan
from longctx.serving.predictor import Predictor, Work
from longctx.simulation.hardware import predictor
from longctx.simulation.utilization import max_tokens

_ROWS = 4096  # that predictors are asked for at least; prompts are longer, and predicted by the same products


class LoongServeCost:
    """What batches take on instances of `tensor` devices each.

    Prompts are sharded over the instances of a group and attend in a ring (pass-KV), which attention hides as far as it
    can. Decodes are replicated over the instances that have their keys, and merged.

    Attributes:
      capacity: tokens whose keys and values fit into one instance.
      tipping_point: tokens of a batch beyond which a longer one is read no faster a token.
    """

    def __init__(self, model: LlamaConfig, topology: Topology, tensor: int, max_degree: int) -> None:
        self._predictors: dict[int, Predictor] = {
            degree: predictor(model, topology, ParallelPlan(1, degree, tensor), max_rows=_ROWS)
            for degree in range(1, max_degree + 1)
        }
        self.capacity = max_tokens(model, ParallelPlan(1, 1, tensor), topology.device)
        link = topology.link("context")
        self._token_seconds = cache_bytes(model, 1, 1, tensor) / (link.bandwidth * link.share)
        self._latency = link.latency
        sizes = [1 << power for power in range(_ROWS.bit_length())]
        speeds = {size: size / self._predictors[1].seconds(Work(size, 1)) for size in sizes}
        self.tipping_point = next(size for size in sizes if speeds[size] >= 0.95 * max(speeds.values()))

    def prefill_work(self, prompts: Iterable[int], degree: int) -> Work:
        """A rank's work of whole prompts of so many tokens, in one batch on `degree` instances."""
        work, rows = Work(), 0
        for tokens in prompts:
            if degree == 1:
                work = work.with_chunk(0, tokens, True)
            else:
                share = -(-(rows + tokens) // degree) - -(-rows // degree)
                work, rows = work.with_sharded(0, tokens, degree, 0, True, "pass_kv", share), rows + tokens
        return work

    def prefill_seconds(self, prompts: Iterable[int], degree: int) -> float:
        """Seconds of whole prompts of so many tokens, in one batch on `degree` instances."""
        return self._predictors[degree].seconds(self.prefill_work(prompts, degree))

    def decode_seconds(self, rows: int, keys: int, degree: int) -> float:
        """Seconds of one token for each of `rows` requests, where the fullest of `degree` instances has `keys` keys."""
        return self._predictors[degree].seconds(Work(rows, rows, keys, replicated=rows if degree > 1 else 0))

    def migration_seconds(self, tokens: int) -> float:
        """Seconds in which keys and values of so many tokens move to another instance, all devices at once."""
        return self._latency + tokens * self._token_seconds
