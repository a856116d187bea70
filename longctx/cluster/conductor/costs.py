"""`PredictorCosts`: seconds of an instance's work, by a serving predictor. No JAX."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from longctx.models.config import LlamaConfig
from longctx.models.footprint import cache_bytes
from longctx.models.validation import check_integer, check_real
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor, check_predictor
from longctx.serving.predictor.work import Work

_REMEMBERED = 2**14  # prompts: many of a time have the same lengths, and all instances are asked for each
_ONE_DEVICE = ParallelPlan()


@dataclass(frozen=True)
class PredictorCosts:
    """Seconds and bytes of work on an instance, by the predictor of the engine's own scheduler.

    A prompt is `predictor.prefill_seconds` in steps of `chunk` tokens, and with several stages, what its last step
    takes in the stages after the first (SPP). Decodes are one batch: over context ranks its rows and keys are shared
    evenly, and a token takes a step in each stage.

    Attributes:
      chunk: tokens of a step of one context rank.
      token_bytes: of keys and values of a token, in all layers.
      plan: of the instance's devices.
      prompt_seconds: of the tokens of a prompt from `start` to `stop`, where a request spans context ranks, such as
        `longctx.serving.scheduler.forecast.PromptTime.prefill_seconds`; None: the predictor's.

    Raises:
      TypeError, ValueError: the predictor can't be used, or a number is out of range.
    """

    predictor: Predictor
    chunk: int
    token_bytes: float
    plan: ParallelPlan = _ONE_DEVICE
    prompt_seconds: Callable[[int, int], float] | None = None
    _known: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_predictor(self.predictor, check_integer("chunk", self.chunk, 1))
        if not check_real("token_bytes", self.token_bytes, 0) > 0:
            raise ValueError(f"token_bytes must be more than 0, got {self.token_bytes}")

    @classmethod
    def of_model(
        cls,
        predictor: Predictor,
        model: LlamaConfig,
        chunk: int,
        plan: ParallelPlan | None = None,
        dtype_bytes: int = 2,
        prompt_seconds: Callable[[int, int], float] | None = None,
        kv_dtype: str | None = None,
    ) -> "PredictorCosts":
        """Make the costs of a model whose KV cache has `dtype_bytes` bytes a number, or an engine's `kv_dtype`."""
        token_bytes = cache_bytes(model, 1, 1, 1, dtype_bytes, kv_dtype)
        return cls(predictor, chunk, token_bytes, plan or _ONE_DEVICE, prompt_seconds)

    def prefill_seconds(self, cached: int, prompt: int) -> float:
        """Return the seconds of tokens `cached` to `prompt`, alone; 0 if there are none."""
        seconds = self._known.get((cached, prompt))
        if seconds is None:
            seconds = self._prefill_seconds(cached, prompt)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[cached, prompt] = seconds
        return seconds

    def _prefill_seconds(self, cached: int, prompt: int) -> float:
        if prompt <= cached:
            return 0.0
        if self.prompt_seconds is not None:
            seconds = self.prompt_seconds(cached, prompt)
        else:
            seconds = self.predictor.prefill_seconds(cached, prompt, self.chunk)
        stages = self.plan.stage
        if stages > 1:
            count = (prompt - cached - 1) % self.chunk + 1
            seconds += (stages - 1) * self.predictor.seconds(Work().with_chunk(prompt - count, count, True))
        return seconds

    def decode_seconds(self, batch: int, tokens: int) -> float:
        """Return the seconds between the tokens of `batch` decodes with contexts of `tokens` tokens in all; 0 for none.

        More decodes than one step has rows take several steps.
        """
        if batch < 1:
            return 0.0
        ranks = self.plan.context
        rows, keys = -(-batch // ranks), -(-tokens // ranks)
        steps = -(-rows // self.chunk)
        share = -(-rows // steps)
        seconds = self.predictor.seconds(Work(rows=share, samples=share, decode_keys=-(-keys // steps)))
        return self.plan.stage * steps * seconds

    def inline_seconds(self, batch: int, tokens: int, cached: int, prompt: int) -> float:
        """Return the seconds of a step of decodes and of all tokens `cached` to `prompt`; inf: a step has no room.

        Over context ranks, rows and keys are shared evenly; a token takes a step in each stage.
        """
        ranks = self.plan.context
        rows, keys = -(-batch // ranks), -(-tokens // ranks)
        if rows + -(-(prompt - cached) // ranks) > self.chunk:
            return inf
        work = Work(rows=rows, samples=rows, decode_keys=keys)
        if ranks > 1:
            work = work.with_sharded(cached, prompt - cached, ranks, samples=True)
        else:
            work = work.with_chunk(cached, prompt - cached, True)
        return self.plan.stage * self.predictor.seconds(work)

    def transfer_bytes(self, tokens: int) -> float:
        """Return the bytes of keys and values of a number of tokens."""
        return self.token_bytes * tokens
