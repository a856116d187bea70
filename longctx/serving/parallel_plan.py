"""How an engine is spread over devices: `ParallelPlan`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from longctx.serving.kv_cache.placement import Placer
from longctx.serving.validation import check_integer

if TYPE_CHECKING:
    from longctx.models import LlamaConfig

EXCHANGES = ("auto", "kvp", "pass_q", "pass_kv")
PLACEMENTS = ("grow", "interleave")


@dataclass(frozen=True)
class ParallelPlan:
    """The mesh `(stage, context, tensor)`, where pages go and how chunks attend across `context`. Plain data.

    No plan changes an answer. Every device has `num_layers / stage` layers and a share 1 / tensor of their heads and
    feed-forward; each of the `context` ranks has pages of its own and batches short requests of its own.

    Attributes:
      stage: of the sequence pipeline: a chunk is in one stage while the next is in the stage before (Mnemosyne, 4.3).
      context: ranks that pages are spread over.
      tensor: devices that share heads, feed-forward and vocabulary.
      exchange: how the rows of a request that spans ranks are computed. `"kvp"`: by all of its ranks alike, and states
        merge (Mnemosyne, 4.4). `"pass_q"`, `"pass_kv"`: sharded over all ranks in zigzag; then queries, or keys and
        values, go round a ring (context parallelism paper, 3.5), while what is no longer than one rank's step goes by
        `"kvp"`. `"auto"`: the one of these two that `choose_ring` expects to be faster, in each step.
      placement: `"grow"`: pages stay on one rank up to its limit, then on one more (Mnemosyne, 4.4). `"interleave"`:
        round over all ranks, decodes too (context parallelism paper, 3.6).
      rank_tokens: the most tokens of one request on a rank before it grows. None: as many as a rank's memory holds,
        and as a decode can read within its TPOT target, by prediction.

    Raises:
      TypeError, ValueError: a value is out of range; the message names it.
    """

    stage: int = 1
    context: int = 1
    tensor: int = 1
    exchange: Literal["auto", "kvp", "pass_q", "pass_kv"] = "auto"
    placement: Literal["grow", "interleave"] = "grow"
    rank_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("stage", "context", "tensor"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}, got {self.exchange!r}")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}")
        if self.rank_tokens is not None:
            object.__setattr__(self, "rank_tokens", check_integer("rank_tokens", self.rank_tokens, 1))

    @property
    def num_devices(self) -> int:
        return self.stage * self.context * self.tensor

    @functools.cached_property
    def shards_rows(self) -> bool:
        """Whether some rows are sharded over `context`."""
        return self.context > 1 and self.exchange != "kvp"

    def check(self, model: LlamaConfig, num_devices: int) -> None:
        """ValueError, with the numbers, where a model or the devices can't be spread like this."""
        if self.num_devices > num_devices:
            raise ValueError(
                f"plan needs stage * context * tensor = {self.stage} * {self.context} * {self.tensor} = "
                f"{self.num_devices} devices, and there are {num_devices}"
            )
        if model.num_layers % self.stage:
            raise ValueError(f"plan's stage must divide the model's {model.num_layers} layers, got {self.stage}")
        for name, size in (("query heads", model.num_heads), ("feed-forward columns", model.intermediate_size)):
            if size % self.tensor:
                raise ValueError(f"plan's tensor must divide the model's {size} {name}, got {self.tensor}")
        if model.num_kv_heads % self.tensor and self.tensor % model.num_kv_heads:
            raise ValueError(
                f"plan's tensor must divide the model's {model.num_kv_heads} KV heads or be a multiple of them, "
                f"got {self.tensor}"
            )

    def placer(self, page_size: int, rows: int, predicted_tokens: float) -> Placer:
        """What places pages; `predicted_tokens`: what a decode can read of one rank within its target, or if that is
        less, a step's rows.
        """
        tokens = max(rows, predicted_tokens) if self.rank_tokens is None else self.rank_tokens
        limit = math.inf if tokens == math.inf else max(1, int(tokens) // page_size)
        return Placer(self.context, self.placement == "interleave", limit)


def is_sharded(plan: ParallelPlan, decodes: bool, remaining: int, rows: int) -> bool:
    """Whether a sequence's next rows are sharded: all where pages are, else those of prompts longer than a step."""
    return plan.shards_rows and (plan.placement == "interleave" or (not decodes and remaining > rows))
