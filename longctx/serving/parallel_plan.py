"""`ParallelPlan`: how an engine is distributed over devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from longctx.models.validation import check_integer, check_real
from longctx.serving.kv_cache.placement import Placer
from longctx.serving.validation import Positive, check_fields

if TYPE_CHECKING:  # `--help` reads plans: the rules load numpy
    from longctx.models import LlamaConfig
    from longctx.parallel.choose import EmpiricalRule
else:
    EmpiricalRule = Any

EXCHANGES = ("auto", "kvp", "pass_q", "pass_kv", "all_gather", "algorithm_1", "algorithm_5", "empirical")


@dataclass(frozen=True)
class ParallelPlan:
    """The sizes of the mesh `(stage, context, tensor)`, the placement of pages, and the exchange over `context`.

    It is plain data, and no plan changes an answer. Every device has `num_layers / stage` layers, rounded up or
    down, and a share 1 / tensor of their heads and feed-forward. Each of the `context` ranks has pages of its own, and
    batches short requests of its own.

    Attributes:
      stage: devices along this axis: sequence pipeline. A chunk is in one stage while the next chunk is in the stage
        before (Mnemosyne, section 4.3).
      context: devices along this axis: ranks that pages are sharded over.
      tensor: devices along this axis: they share heads, feed-forward and vocabulary.
      exchange: exchange across --context: `"auto"`, `"kvp"`, `"pass_q"`, `"pass_kv"`, `"all_gather"`, `"algorithm_1"`,
        `"algorithm_5"`, `"empirical"` or `"empirical:ALPHA,BETA,GAMMA"`. It says how the rows of a request that spans
        ranks are computed.
        `"kvp"`: replicated on all of its ranks, whose states are merged (Mnemosyne, section 4.4).
        `"pass_q"`, `"pass_kv"`, `"all_gather"`: sharded over all ranks in zigzag, with queries, or keys and values,
        going round a ring, or with all keys gathered (context parallelism paper, section 3.5). Under `"grow"` rows of
        decodes and of prompts that fit into one rank's step use `"kvp"`; under `"interleave"` decodes go by pass-Q
        (algorithm 4).
        `"algorithm_1"`, `"algorithm_5"`, `"empirical"`: in each step pass-KV or pass-Q, by that rule of the paper; the
        last is appendix D's, with coefficients fitted to its table 4. An `EmpiricalRule` has coefficients of its own,
        and so has `"empirical:ALPHA,BETA,GAMMA"`, which it becomes.
        `"auto"`: in each step the one of all four that takes least by prediction, on the engine's topology.
      placement: placement of pages over --context. `"grow"`: pages stay on one rank up to its limit, then on one more
        (Mnemosyne, section 4.4). `"interleave"`: pages go round robin over all ranks, those of decodes too (context
        parallelism paper, section 3.6).
      rank_tokens: the most tokens of a request on one rank before it grows onto another. None: as many as fit into
        memory and keep the TPOT target. A decode is then predicted to read them within its target.
      ffn: devices that share output projections and feed-forward. `"tensor"`: those of --tensor; context ranks have
        copies. `"all"`: those of --tensor and --context, so that a device holds and reads fewer weights (Helix).

    Raises:
      TypeError, ValueError: a value is out of range; the message names it.

    Source:
      Mnemosyne, 4.3 and 4.4; Medha, 3.4 and 3.5; Context Parallelism for Scalable Million-Token Inference, 3.4 to
      3.6, algorithms 1, 4 and 5, appendix D; Helix Parallelism, 2.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import ParallelPlan
      >>> plan = ParallelPlan.medha(stage=4, context=2, tensor=8)
      >>> plan.num_devices, plan.exchange, plan.placement
      (64, 'kvp', 'grow')
      >>> model = LlamaConfig.preset("llama-3-8b")
      >>> plan.check(model, 64, device_bytes=80e9, tokens=10_000_000)  # a cache of 10M tokens fits
      >>> ParallelPlan(tensor=8).check(model, 8, device_bytes=80e9, tokens=10_000_000)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
          ...
      ValueError: plan needs 2.0 GB of weights and 163.8 GB for the keys and values of ...
    """

    stage: Positive = 1
    context: Positive = 1
    tensor: Positive = 1
    exchange: str | EmpiricalRule = "auto"
    placement: Literal["grow", "interleave"] = "grow"
    rank_tokens: Positive | None = None
    ffn: Literal["tensor", "all"] = "tensor"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.exchange not in EXCHANGES:
            object.__setattr__(self, "exchange", self._empirical_exchange())

    @classmethod
    def medha(cls, stage: int = 1, context: int = 1, tensor: int = 1, **overrides: Any) -> ParallelPlan:
        """Medha's and Mnemosyne's plan: SPP, KVP and TP. `overrides` are arguments of `ParallelPlan`.

        Requests start on one rank and grow to others; the states of their rows are merged (Medha, 3.4 and 3.5).

        Args:
          stage, context, tensor: sizes of the mesh.
          **overrides: arguments of `ParallelPlan`.

        Returns:
          The plan.
        """
        return cls(stage, context, tensor, **{"exchange": "kvp", "placement": "grow"} | overrides)

    @classmethod
    def meta(cls, context: int = 1, tensor: int = 1, **overrides: Any) -> ParallelPlan:
        """The plan of the context parallelism paper: CP over hosts, TP within them.

        Keys and values are spread evenly, those of decodes too (3.6), and algorithm 1 chooses the exchange of each step
        (3.4), by its chunks of prompts alone: decodes beside them change none.

        Args:
          context, tensor: sizes of the mesh.
          **overrides: arguments of `ParallelPlan`.
        """
        return cls(1, context, tensor, **{"placement": "interleave", "exchange": "algorithm_1"} | overrides)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh: `stage * context * tensor`."""
        return self.stage * self.context * self.tensor

    @property
    def ffn_ranks(self) -> int:
        """Context ranks that output projections and feed-forward are sharded over."""
        return self.context if self.ffn == "all" else 1

    def computing_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The context ranks that compute rows of a sequence whose pages are on these.

        With `ffn="all"` rows of several ranks are replicated on all of them, as all have a part of their weights.
        """
        return tuple(range(self.context)) if self.ffn == "all" and len(ranks) > 1 else ranks

    @functools.cached_property
    def shards_rows(self) -> bool:
        """Whether some rows are sharded over `context`."""
        return self.context > 1 and self.exchange != "kvp"

    @functools.cached_property
    def empirical_rule(self) -> EmpiricalRule | None:
        """The rule of appendix D, if the plan chooses by one."""
        name, _, coefficients = str(self.exchange).partition(":")
        if name != "empirical":
            return None
        from longctx.parallel.choose import EmpiricalRule, paper_rule

        return EmpiricalRule.parse(coefficients) if coefficients else paper_rule()

    def _empirical_exchange(self) -> str:
        """Return the name of an exchange that is a rule with coefficients."""
        from longctx.parallel.choose import EmpiricalRule

        if isinstance(self.exchange, EmpiricalRule):
            return self.exchange.name
        about = f"exchange must be one of {', '.join(EXCHANGES)}, or empirical:ALPHA,BETA,GAMMA, got {self.exchange!r}"
        if not isinstance(self.exchange, str):
            raise TypeError(about)
        name, colon, coefficients = self.exchange.partition(":")
        if name != "empirical" or not colon:
            raise ValueError(about)
        try:
            EmpiricalRule.parse(coefficients)
        except ValueError as error:
            raise ValueError(f"{about}: {error}") from None
        return self.exchange

    def check(
        self,
        model: LlamaConfig,
        num_devices: int,
        device_bytes: float | None = None,
        tokens: int = 0,
        kv_dtype: str | None = None,
    ) -> None:
        """Check that a model and a number of devices suit this plan, before there is either.

        Args:
          model: whose sizes count.
          num_devices: how many there are.
          device_bytes: memory of a device that weights and cache may take; None: not checked. What a step computes with
            comes on top: an engine, which knows its shapes, estimates that itself.
          tokens: tokens of all requests whose keys and values shall fit.
          kv_dtype: of these, as of `EngineConfig`; None: 16 bits, like weights that are not quantised.

        Raises:
          TypeError, ValueError: they don't, and the message has the numbers; or an argument is out of range.
        """
        if device_bytes is not None:
            check_real("device_bytes", device_bytes, 0)
        check_integer("tokens", tokens, 0)
        check_integer("num_devices", num_devices, 0)
        if self.num_devices > num_devices:
            raise ValueError(
                f"plan needs stage * context * tensor = {self.stage} * {self.context} * {self.tensor} = "
                f"{self.num_devices} devices, and there are {num_devices}"
            )
        if self.stage > model.num_layers:
            raise ValueError(f"plan's stage must be at most the model's {model.num_layers} layers, got {self.stage}")
        for name, size in (("query heads", model.num_heads), ("feed-forward columns", model.intermediate_size)):
            if size % self.tensor:
                raise ValueError(f"plan's tensor must divide the model's {size} {name}, got {self.tensor}")
            if size % (self.tensor * self.ffn_ranks):
                raise ValueError(
                    f"plan's context * tensor must divide the model's {size} {name} with ffn='all', "
                    f"got {self.context} * {self.tensor}"
                )
        if model.num_kv_heads % self.tensor and self.tensor % model.num_kv_heads:
            raise ValueError(
                f"plan's tensor must divide the model's {model.num_kv_heads} KV heads or be a multiple of them, "
                f"got {self.tensor}"
            )
        if device_bytes is not None:
            self._check_memory(model, device_bytes, tokens, kv_dtype)

    def _check_memory(self, model: LlamaConfig, device_bytes: float, tokens: int, kv_dtype: str | None) -> None:
        from longctx.models.footprint import cache_bytes, weight_bytes

        weights = weight_bytes(model, self.stage, self.tensor, ffn_ranks=self.ffn_ranks)
        local_tokens = math.ceil(tokens / self.context)
        cache = cache_bytes(model, local_tokens, self.stage, self.tensor, kv_dtype=kv_dtype)
        if weights + cache > device_bytes:
            raise ValueError(
                f"plan needs {weights / 1e9:.1f} GB of weights and {cache / 1e9:.1f} GB for the keys and values of "
                f"{tokens} tokens on each device, which has {device_bytes / 1e9:.1f} GB: a larger stage or tensor "
                "divides both, a larger context the latter, and with ffn='all' most weights"
            )

    def placer(self, page_size: int, rows: int, readable_tokens: Callable[[float | None], float]) -> Placer:
        """The placer of pages.

        Args:
          page_size: tokens of a page.
          rows: token budget of a step, the least limit of tokens on a rank.
          readable_tokens: of a TPOT target, tokens on one rank with which a decode keeps it, by prediction.
        """

        def limit(tpot: float | None) -> float:
            tokens = max(rows, readable_tokens(tpot)) if self.rank_tokens is None else self.rank_tokens
            return math.inf if tokens == math.inf else int(tokens) // page_size

        return Placer(self.context, self.placement == "interleave", limit)
