"""Seconds that the rows of a step exchange over context ranks, besides computing them."""

import dataclasses
from typing import Any

from longctx.parallel.cost import Hardware, LayerCost, ModelShape
from longctx.serving.predictor.work import Work


@dataclasses.dataclass(frozen=True)
class ExchangeCost:
    """Cost of what a step's replicated and sharded rows exchange in all layers of a stage.

    The states of replicated rows are merged, and nothing hides that. Of sharded rows, in pass-KV cached and new keys go
    round in N - 1 hops, which attention hides; in pass-Q new keys are gathered, queries go round in N - 1 hops and
    states come home; in all-gather all keys are gathered. Where nothing is cached, in pass-Q no query travels. Where
    the exchange isn't known, the faster one of pass-KV and pass-Q counts, as `exchange="auto"` would choose.

    Attributes:
      layers: of the largest stage.
      ranks: N.
      model, hardware: of one device.

    Source: context parallelism paper, 3.5 and appendix C; Mnemosyne, 4.4; see `longctx.parallel.cost`.
    """

    layers: int
    ranks: int
    model: ModelShape
    hardware: Hardware

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cost", LayerCost(self.model, self.hardware, self.ranks))

    def seconds(self, work: Work, attention: float) -> float:
        """Seconds of a rank's exchanges, in a step in which its attention to prompts' chunks takes `attention`."""
        cost: LayerCost = self._cost  # type: ignore[attr-defined]
        total = cost.merge(work.replicated) if work.replicated else 0.0
        if work.sharded:
            part = attention / self.layers / self.ranks
            match work.exchange:
                case "pass_kv":
                    total += self._pass_kv(cost, work, part)
                case "pass_q":
                    total += self._pass_q(cost, work, part)
                case "all_gather":
                    total += cost.gather_keys(work.ring_cached + work.sharded)
                case _:
                    total += min(self._pass_kv(cost, work, part), self._pass_q(cost, work, part))
        return self.layers * total

    def _pass_kv(self, cost: LayerCost, work: Work, part: float) -> float:
        return cost.ring(cost.hop((work.ring_cached + work.sharded) * cost.key_bytes), part)

    def _pass_q(self, cost: LayerCost, work: Work, part: float) -> float:
        new = cost.gather_keys(work.sharded)
        # Decodes are sharded only where all rows are, and they have keys that are cached.
        if not work.ring_cached and not (work.decode_keys and work.sharded == work.rows):
            return new
        return new + cost.ring(cost.hop(work.sharded * cost.query_bytes), part) + cost.send_states(work.sharded)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ExchangeCost":
        """From plain data, as `dataclasses.asdict` makes it; TypeError or ValueError if it isn't that."""
        parts = {"model": ModelShape(**fields["model"]), "hardware": Hardware(**fields["hardware"])}
        return cls(**fields | parts)
