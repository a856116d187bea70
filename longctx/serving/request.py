"""What a user asks for: `SamplingParams` and `Request`, checked when they are made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn, and when it ends. The defaults are greedy.

    Attributes:
      max_tokens: tokens to generate at most.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: keep the k likeliest tokens; None keeps all.
      top_p: keep the likeliest tokens whose probabilities first reach this sum.
      min_p: keep the tokens at least this probable, relative to the likeliest.
      repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt or output.
      presence_penalty: is subtracted from the logits of tokens in the output.
      seed: the tokens depend on it, and on nothing else in the batch. None: the engine draws one.
      n: how many continuations; they share the pages of the prompt.
      stop: strings that end the text and are not part of it.
      stop_token_ids: tokens that end it; they stay in the token ids, and out of the text.
      ignore_eos: go on after the model's own end tokens.
      logprobs: with each token, its log probability and those of that many likeliest ones (before temperature,
        penalties and cuts).
      prompt_logprobs: the same of the prompt's tokens, but the first. Such a request computes its whole prompt.

    Raises:
      TypeError, ValueError: a value out of range, or options that contradict each other.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("n", self.n, 1)
        for name in ("top_k", "seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1 if name == "top_k" else 0)
        if self.seed is not None and self.seed >= 2**31:
            raise ValueError(f"seed must be below 2**31, got {self.seed}")
        _check_real("temperature", self.temperature, 0)
        _check_real("top_p", self.top_p, 0, 1)
        _check_real("min_p", self.min_p, 0, 1)
        _check_real("repetition_penalty", self.repetition_penalty, 0)
        _check_real("presence_penalty", self.presence_penalty, -2, 2)
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise ValueError("top_p and repetition_penalty must be above 0")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be strings, none of them empty, got {self.stop!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0)
        if self.temperature == 0:
            if self.top_k is not None or self.top_p < 1 or self.min_p > 0:
                raise ValueError("top_k, top_p and min_p contradict temperature=0, which takes the likeliest token")
            if self.n > 1:
                raise ValueError(f"n={self.n} contradicts temperature=0, which gives one continuation")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        return self.temperature == 0 and not self.has_penalties and self.logprobs is None


@dataclass(frozen=True)
class Request:
    """A prompt and what is wanted of it.

    Attributes:
      prompt: text, or token ids.
      sampling: see `SamplingParams`.
      request_id: must be unique among the requests that have not ended; None: the engine makes one.
      session_id: a conversation. Its next turn, a prompt that begins with this one and its output, finds all of its
        pages, the last partial one too, unless memory was needed for others meanwhile.
      tenant: requests of different tenants never share pages.
      ttft_deadline: seconds from arrival within which the first token is wanted.
      tpot_target: seconds between later tokens that are wanted at most.
      priority: 0 or more; higher is more urgent. Like deadline and target it is for policies: `fcfs` heeds none.
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    session_id: str | None = None
    tenant: str = ""
    ttft_deadline: float | None = None
    tpot_target: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingParams):
            raise TypeError(f"sampling must be SamplingParams, got {type(self.sampling).__name__}")
        for name in ("request_id", "session_id", "tenant"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "tenant"):
                raise TypeError(f"{name} must be a string, got {value!r}")
        for name in ("ttft_deadline", "tpot_target"):
            value = getattr(self, name)
            if value is not None:
                _check_real(name, value, 0)
                if value == 0:
                    raise ValueError(f"{name} must be above 0")
        _check_integer("priority", self.priority, 0)


def _check_integer(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")


def _check_real(name: str, value: object, low: float, high: float = math.inf) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not low <= float(value) <= high or not math.isfinite(value):
        raise ValueError(f"{name} must be finite and {low} to {high}, got {value}")
