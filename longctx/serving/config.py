"""How large an engine is and how it admits requests: `EngineConfig`."""

from dataclasses import dataclass, field
from typing import Literal

from longctx.serving.scheduler.chunking import Chunking
from longctx.serving.scheduler.policy import Policy, make_policy
from longctx.serving.scheduler.slo import Slo
from longctx.serving.validation import check_bool, check_integer, check_real

MAX_RUN_AHEAD = 8


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and rules of an engine; nothing here changes an answer.

    Attributes:
      page_size: tokens of a page.
      num_pages: pages of the cache, on each context rank. None: what fits.
      max_running: sequences that are read or written at a time.
      max_length: prompt and output of the longest sequence, in tokens. None: the model's context.
      token_budget: rows of a step at most, on a rank; decodes and chunks of prompts together.
      policy: whose prompt is read next: `"fcfs"`, `"edf"`, `"srpf"`, `"lrs"`, `"ilrs"`, or a `Policy` of one's own.
      chunking: `"static"` fills the token budget in every step, `"static:N"` N rows of it; `"adaptive"` as many as keep
        the TPOT targets of running decodes, by prediction.
      max_share: the share of a step that a long prompt leaves to short ones at most, under `ilrs`, 0 to 1.
      slo: what is due to requests that bring no `ttft_deadline` or `tpot_target`.
      buckets: numbers of rows that are compiled. None: doubling from 8, and the exact budget. With several context
        ranks, of each kind of rows (docs/parallel_plans.md), whose combinations are programs: growing by 8 then.
      run_ahead: steps that are planned before the result of the first is there, 1 to 8, at most; none ahead of steps
        that should take 50 ms.
      admission: `"reserve"` admits a request when its prompt and max_tokens fit; `"optimistic"` when its prompt
        does, and when memory runs out puts the latest request back, to be recomputed.
      prefix_cache: share full pages among requests that begin alike.
      max_logprobs: the largest `logprobs` that a request may ask for.
      seed: what the seeds of requests without one are drawn from.
      hash_key: secret of the page hashes, 16 to 64 bytes. None: random.

    Raises:
      TypeError, ValueError: a value out of range; the message names it.
    """

    page_size: int = 64
    num_pages: int | None = None
    max_running: int = 64
    max_length: int | None = None
    token_budget: int = 512
    policy: str | Policy = "ilrs"
    chunking: str = "static"
    max_share: float = 0.5
    slo: Slo = field(default_factory=Slo)
    buckets: tuple[int, ...] | None = None
    run_ahead: int = 2
    admission: Literal["reserve", "optimistic"] = "reserve"
    prefix_cache: bool = True
    max_logprobs: int = 5
    seed: int = 0
    hash_key: bytes | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_running", "max_length", "token_budget", "run_ahead"):
            value = getattr(self, name)
            if value is not None or name in ("page_size", "max_running", "token_budget", "run_ahead"):
                object.__setattr__(self, name, check_integer(name, value, 1))
        check_integer("seed", self.seed, 0)
        check_integer("max_logprobs", self.max_logprobs, 0)
        check_bool("prefix_cache", self.prefix_cache)
        if self.hash_key is not None and (not isinstance(self.hash_key, bytes) or not 16 <= len(self.hash_key) <= 64):
            raise ValueError("hash_key must be None or 16 to 64 bytes")
        if self.run_ahead > MAX_RUN_AHEAD:
            raise ValueError(f"run_ahead must be at most {MAX_RUN_AHEAD}, got {self.run_ahead}")
        if self.max_running > self.token_budget:
            raise ValueError(
                f"token_budget must have a row for each of max_running={self.max_running}, got {self.token_budget}"
            )
        check_real("max_share", self.max_share, 0, 1)
        make_policy(self.policy, self.max_share)
        Chunking.parse(self.chunking, self.token_budget, self.max_running)
        if not isinstance(self.slo, Slo):
            raise TypeError(f"slo must be an Slo, got {self.slo!r}")
        if self.admission not in ("reserve", "optimistic"):
            raise ValueError(f'admission must be "reserve" or "optimistic", got {self.admission!r}')
        if self.buckets is not None:
            if not isinstance(self.buckets, tuple | list):
                raise TypeError(f"buckets must be a tuple of integers, got {self.buckets!r}")
            buckets = tuple(sorted(check_integer("buckets", rows, 1) for rows in self.buckets))
            if not buckets or buckets[-1] != self.token_budget:
                raise ValueError(f"buckets must end at token_budget={self.token_budget}, got {self.buckets}")
            object.__setattr__(self, "buckets", buckets)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """The numbers of rows that are compiled, ascending."""
        return self.growing_buckets(2)

    def growing_buckets(self, factor: int) -> tuple[int, ...]:
        """`buckets`, or if there are none, growing by a factor from 8 to the token budget."""
        if self.buckets is not None:
            return self.buckets
        rows = [8]
        while rows[-1] < self.token_budget:
            rows.append(rows[-1] * factor)
        return (*(x for x in rows if x < self.token_budget), self.token_budget)
