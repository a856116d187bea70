"""`EngineConfig`: sizes of an engine and rules by which it schedules. `AdmissionLimits`: of what may wait for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from longctx.models.validation import check_integer, check_kv_dtype, check_real, shown
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.window_pages import WindowNeeds, window_span
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.scheduler.policy import Policy, PolicyName, make_policy
from longctx.serving.scheduler.slo import Slo
from longctx.serving.validation import Count, Positive, Range, Share, check_fields, check_text

if TYPE_CHECKING:  # `--help` reads settings: these load numpy
    from longctx.serving.scheduler.chunking import Chunking
    from longctx.serving.scheduler.exchange_rule import RowBuckets

MAX_RUN_AHEAD = 8


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and rules of an engine. No field but `kv_dtype` changes an answer.

    `medha`, `sarathi` and `meta` are the papers' own.

    Attributes:
      page_size: tokens of a page of the KV cache.
      num_pages: pages of the KV cache on each context rank. None: as many as fit into memory.
      num_window_pages: pages of layers with a sliding window, on each context rank. None: as many as the sequences that
        run can need at most. More of them let more requests begin with tokens of earlier ones.
      max_running: the most sequences that run at a time.
      max_length: tokens of the longest sequence, prompt and output. None: the model's context.
      token_budget: the most rows of a step on a rank, decodes and prefill chunks together.
      policy: which prompt is prefilled next: `"fcfs"`, `"edf"`, `"srpf"`, `"lrs"`, `"lrs_relative"` or `"ilrs"`. It may
        also be a custom `Policy`.
      chunking: how many rows of a step prompts get: `"adaptive"`, `"static"` or `"static:N"`. `"adaptive"` gives them
        as many rows as keep the TPOT targets of running decodes, by prediction; `"static"` fills the token budget in
        every step, `"static:N"` N rows of it.
      max_share: the largest share of a step that a long prompt leaves to short ones under `ilrs`.
      slo: deadlines and targets of requests that have no `ttft_deadline` or `tpot_target` of their own.
      buckets: numbers of rows that steps are compiled for. None: doubling from 8, and the exact budget. With several
        context ranks, the numbers of each kind of rows (docs/parallel_plans.md), every combination of which is a
        program; None: growing by a factor of 8. With `"static:N"` those of sharded rows end at N.
      run_ahead: the most steps that are in flight at a time. No step is planned ahead of one that is predicted to take
        50 ms.
      admission: when a request may begin: with room for all of its tokens, or for its prompt, and it may be preempted.
        `"reserve"` admits a request when prompt and max_tokens fit, and preempts no request; `"optimistic"` when its
        prompt fits, and preempts others when memory runs out, or prompts for a more urgent one, to be recomputed. A
        request that grows over context ranks fits if all that run can still get what they need, one after another.
      prefix_cache: whether requests with a common prefix share its full pages.
      max_logprobs: the largest `logprobs` that a request may ask for.
      tenant_weights: what a tenant's requests get while others wait too, relative to 1. The keys are tenants' names.
      seed: seed of the generator that draws the seeds of requests without one.
      hash_key: secret key of the page hashes, 16 to 64 bytes. None: random. Engines that share pages have the same.
      tiers: what keeps pages beyond the devices, see `TierConfig`; None: nothing.
      transfers: whether requests move between this engine and others: what moves their pages is compiled ahead then.
      kv_dtype: dtype of the cache; float8_e4m3fn holds twice the tokens in as much memory, and is not exact. None: the
        parameters'. `"float8_e4m3fn"`, with a float32 scale for each token and KV head, alone of all settings changes
        answers: keys and values are rounded, and plans then agree but for rounding (docs/fp8_pages.md).

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range; the message names it.

    Source:
      Medha, 3.2, 3.3 and 4.2 (`medha`); Sarathi-Serve, as Medha, 5.1, has it (`sarathi`); Context Parallelism for
      Scalable Million-Token Inference, 4.2 (`meta`).

    Examples:
      >>> from longctx.serving import EngineConfig
      >>> EngineConfig(page_size=16, num_pages=1024, token_budget=256).row_buckets
      (8, 16, 32, 64, 128, 256)
      >>> EngineConfig.medha(max_running=8).slo.tpot, EngineConfig.sarathi(2048).policy
      (0.03, 'fcfs')
      >>> EngineConfig(chunking="adaptve")
      Traceback (most recent call last):
          ...
      ValueError: chunking must be "static", "static:N" or "adaptive", got 'adaptve'
    """

    page_size: Positive = 64
    num_pages: Positive | None = None
    max_running: Positive = 64
    max_length: Positive | None = None
    token_budget: Positive = 512
    policy: PolicyName | Policy = "ilrs"
    chunking: str = "adaptive"
    max_share: Share = 0.5
    slo: Slo = field(default_factory=Slo)
    buckets: tuple[int, ...] | None = None
    run_ahead: Annotated[int, Range(1, MAX_RUN_AHEAD)] = 2
    admission: Literal["reserve", "optimistic"] = "reserve"
    prefix_cache: bool = True
    max_logprobs: Count = 5
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    seed: Count = 0
    hash_key: bytes | None = None
    tiers: TierConfig | None = None
    transfers: bool = False
    kv_dtype: str | None = None
    num_window_pages: Positive | None = None

    def __post_init__(self) -> None:
        check_kv_dtype(self.kv_dtype)
        check_fields(self)
        if not isinstance(self.tenant_weights, Mapping):
            raise TypeError(f"tenant_weights must be a mapping of names to numbers, got {shown(self.tenant_weights)}")
        weights = {check_text("tenant_weights", name): weight for name, weight in self.tenant_weights.items()}
        weights = {name: check_real(f"tenant_weights[{name!r}]", weight, 1e-3, 1e3) for name, weight in weights.items()}
        object.__setattr__(self, "tenant_weights", weights)
        if self.hash_key is not None and (not isinstance(self.hash_key, bytes) or not 16 <= len(self.hash_key) <= 64):
            raise ValueError("hash_key must be None or 16 to 64 bytes")
        if self.max_running > self.token_budget:
            raise ValueError(
                f"token_budget must have a row for each of max_running={self.max_running}, got {self.token_budget}"
            )
        make_policy(self.policy, self.max_share)
        self._parse_chunking()
        if not isinstance(self.slo, Slo):
            raise TypeError(f"slo must be an Slo, got {self.slo!r}")
        if not isinstance(self.tiers, TierConfig | None):
            raise TypeError(f"tiers must be a TierConfig, got {shown(self.tiers)}")
        if self.tiers is not None and not self.prefix_cache:
            raise ValueError("tiers need prefix_cache=True: pages are found there by the keys of prefixes")
        if self.buckets is not None:
            if not isinstance(self.buckets, tuple | list):
                raise TypeError(f"buckets must be a tuple of integers, got {self.buckets!r}")
            buckets = tuple(sorted(check_integer("buckets", rows, 1) for rows in self.buckets))
            if not buckets or buckets[-1] != self.token_budget:
                raise ValueError(f"buckets must end at token_budget={self.token_budget}, got {self.buckets}")
            object.__setattr__(self, "buckets", buckets)

    @classmethod
    def medha(cls, **overrides: Any) -> "EngineConfig":
        """Medha's scheduling; it goes with `ParallelPlan.medha`. `overrides` are arguments of `EngineConfig`.

        Prompts by relative slack, short ones in the steps of long ones (4.2). Adaptive chunks of up to 4,096 tokens
        (3.2, 3.3) within a target of 30 ms for every step (Mnemosyne, 6.2; Medha, 4.2, batch packing). Deadlines are a
        multiple of the time that a prompt is predicted to take alone (4.2). Decodes are never preempted (4.2).

        Args:
          **overrides: arguments of `EngineConfig`.

        Returns:
          The configuration.
        """
        paper: dict[str, Any] = {"policy": "ilrs", "chunking": "adaptive", "token_budget": 4096, "admission": "reserve"}
        return cls(**paper | {"slo": Slo(tpot=0.03, tpot_factor=1.0, step_seconds=0.03)} | overrides)

    @classmethod
    def sarathi(cls, chunk: int = 512, **overrides: Any) -> "EngineConfig":
        """Sarathi-Serve's scheduling: first come first served, and `chunk` rows in every step, decodes first.

        Medha compares with chunks of 512 and 2,048 (5.1). Its paper has stages and tensor parallelism, no `context`.

        Args:
          chunk: rows of a step, in tokens.
          **overrides: arguments of `EngineConfig`.

        Returns:
          The configuration.
        """
        paper: dict[str, Any] = {"policy": "fcfs", "chunking": "static", "token_budget": chunk}
        return cls(**paper | overrides)

    @classmethod
    def meta(cls, chunk: int = 32_768, **overrides: Any) -> "EngineConfig":
        """The setting of the context parallelism paper; it goes with `ParallelPlan.meta`.

        One prompt after the other, each of up to `context * chunk` tokens in one step. The paper prefills whole prompts
        with a batch of one: 128k tokens over 1 to 16 hosts, and 1M over 8 and 16 (4.2), which takes chunks of 65,536.

        Args:
          chunk: the most rows of a step on a rank, in tokens.
          **overrides: arguments of `EngineConfig`.
        """
        paper: dict[str, Any] = {"policy": "fcfs", "chunking": "static", "token_budget": chunk}
        return cls(**paper | overrides)

    def longest_sequence(self, max_positions: int) -> int:
        """The tokens of the longest sequence: `max_length`, or the model's context.

        Raises:
          ValueError: the model's context is shorter than `max_length`.
        """
        if self.max_length is None:
            return max_positions
        if self.max_length > max_positions:
            raise ValueError(
                f"max_length must be at most the model's context of {max_positions}, got {self.max_length}"
            )
        return self.max_length

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Numbers of rows that steps are compiled for on one context rank, ascending."""
        return self.growing_buckets(2)

    def growing_buckets(self, factor: int) -> tuple[int, ...]:
        """The `buckets`; if they are None, numbers that grow by a factor from 8, and the token budget."""
        if self.buckets is not None:
            return self.buckets
        rows = [8]
        while rows[-1] < self.token_budget:
            rows.append(rows[-1] * factor)
        return (*(x for x in rows if x < self.token_budget), self.token_budget)

    @property
    def sharded_buckets(self) -> tuple[int, ...]:
        """Numbers of sharded rows that steps are compiled for, of one of several context ranks, ascending.

        They end at the rows that `chunking` lets a step have: a step with as many is full.
        """
        most = self._parse_chunking().tokens
        buckets = self.growing_buckets(8)
        most = max(most, buckets[0])
        return (*(rows for rows in buckets if rows < most), most)

    def most_pages(self, max_length: int) -> int:
        """Return the pages that all that may run could ever need; `max_length`: tokens of the longest sequence."""
        return self.max_running * -(-max_length // self.page_size)

    def count_window_pages(self, window: int | None, plan: ParallelPlan, num_pages: int, max_length: int) -> int:
        """Return the window pages of each rank, of layers with a sliding window.

        Args:
          window: tokens that a query of such a layer sees, itself included; None: there is none.
          plan: of the engine's devices.
          num_pages: pages of each rank, each of which has at most one window page.
          max_length: tokens of the longest sequence.

        Returns:
          `num_window_pages`, or as many as the sequences that run can need; 0 without a window.

        Raises:
          ValueError: `num_window_pages` is less than the sequences that run can need, or is given without a window.
        """
        if window is None:
            if self.num_window_pages is not None:
                raise ValueError(f"num_window_pages must be None without sliding layers, got {self.num_window_pages}")
            return 0
        least = min(num_pages, self.window_needs(window, plan, max_length).per_rank)
        if self.num_window_pages is not None and self.num_window_pages < least:
            raise ValueError(
                f"num_window_pages must be at least {least} for max_running={self.max_running} and a window of "
                f"{window} tokens, got {self.num_window_pages}"
            )
        return min(num_pages, self.num_window_pages or least)

    def window_needs(self, window: int, plan: ParallelPlan, max_length: int) -> WindowNeeds:
        """Return what decides how many window pages a rank needs; the arguments are those of `count_window_pages`."""
        return WindowNeeds(
            window_span(window, self.page_size),
            self.page_size,
            self.max_running,
            self.run_ahead,
            self.token_budget * (plan.context if plan.shards_rows else 1),
            -(-max_length // self.page_size),
            plan.context if plan.placement == "interleave" else 1,
            plan.stage - 1,
            0 if self.tiers is None else plan.stage + 1,
            self.max_running if self.transfers or self.tiers is not None else 0,
        )

    def _parse_chunking(self) -> "Chunking":
        from longctx.serving.scheduler.chunking import Chunking

        return Chunking.parse(self.chunking, self.token_budget, self.max_running)

    def step_rows(self, plan: ParallelPlan) -> "RowBuckets":
        """Return the numbers of rows of each kind that the steps of a plan are compiled for.

        Args:
          plan: of the engine's devices.

        Returns:
          Buckets of sharded, replicated and local rows.
        """
        from longctx.serving.scheduler.exchange_rule import RowBuckets

        if plan.context == 1:
            return RowBuckets(plan, ((0,), (0,), self.row_buckets))
        buckets, sharded = (0, *self.growing_buckets(8)), (0, *self.sharded_buckets)
        if not plan.shards_rows:
            return RowBuckets(plan, ((0,), buckets, buckets))
        if plan.placement == "grow":
            return RowBuckets(plan, (sharded, buckets, buckets))
        # All ranks have pages of every sequence: no row is local. Without predictions single rows alone are replicated,
        # one of a sequence, and with pass-Q none.
        most = {"auto": self.token_budget, "pass_q": 0}.get(str(plan.exchange), self.max_running)
        replicated = (*(rows for rows in buckets if rows < most), next(rows for rows in buckets if rows >= most))
        return RowBuckets(plan, (sharded, replicated, (0,)))


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of what may wait to be admitted.

    They are those of all tenants together. When one is reached, a tenant that has less than its share, the limit by the
    number of tenants that wait, still gets it.

    Attributes:
      max_waiting: requests that may wait; others get 429. Completions count; one request with more of them may wait if
        no other does.
      max_waiting_tokens: tokens of the prompts that may wait. None: any number. One longer prompt may wait if no other
        does.
      max_logprob_bytes: bytes of the log probabilities of all requests, about; one that needs more is refused.
      heeds_deadlines: whether a request is refused whose `ttft_deadline` can't be kept, by prediction.

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import AdmissionControl, AdmissionLimits, Engine, EngineConfig, EngineThread, Request
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> limits = AdmissionLimits(max_waiting=100, max_waiting_tokens=1_000_000)
      >>> thread = EngineThread(engine, AdmissionControl(engine, limits))  # not started
      >>> _ = thread.submit(engine.prepare(Request([1] * 3000)), print)
      >>> thread.control.num_waiting
      1
    """

    max_waiting: Positive = 1024
    max_waiting_tokens: Positive | None = None
    max_logprob_bytes: Positive = 512 * 2**20
    heeds_deadlines: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
