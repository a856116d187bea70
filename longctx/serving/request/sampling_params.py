"""`SamplingParams`, checked when they are made."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal

from longctx.models.validation import MAX_INT32, check_integer, check_real, shown
from longctx.serving.validation import Range, Share, check_fields, check_text

# Ranges in which a device's int32 and float32 hold the numbers, and in which logits stay finite.
_Count = Annotated[int, Range(0, MAX_INT32)]
_Positive = Annotated[int, Range(1, MAX_INT32)]
_Penalty = Annotated[float, Range(-2, 2)]
Pooling = Literal["mean", "last"]

MAX_LOGIT_BIAS = 300
"""Tokens that a request may have biases for; the devices hold this many for each slot."""


class SamplingLevel(IntEnum):
    """The computations that a row needs to sample its token; each level includes those below it.

    A step samples with the program of its highest row, and a token is the same at every level that its row may have.
    """

    GREEDY = 0
    """The most likely token."""
    TEMPERATURE = 1
    """A random token, by temperature and min_p."""
    MASKS = 2
    """Masks of the tokens that may come: grammars, and other rules of `TokenMask`."""
    FILTERS = 3
    """Biases, penalties, top_k and top_p."""
    LOGPROBS = 4
    """Log probabilities of the token and of the most likely ones."""


@dataclass(frozen=True)
class SamplingParams:
    r"""Rules by which a request's tokens are drawn, and when it ends. The defaults are greedy.

    Integers are below 2**31, as the devices hold them.

    Attributes:
      max_tokens: tokens to generate, at most.
      temperature: divides the logits; 0 takes the most likely token. Positive ones are 1e-6 to 1e6.
      top_k: keep the k most likely tokens. None: all.
      top_p: keep the most likely tokens whose probabilities first reach this sum.
      min_p: keep the tokens at least this probable, relative to the most likely one.
      repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt or output; 1e-3 to
        1e3.
      presence_penalty: is subtracted from the logits of tokens in the output, -2 to 2.
      frequency_penalty: is subtracted from the logit of a token as many times as the output has it, -2 to 2.
      logit_bias: (token, bias) pairs, at most 300 and each token once; biases of -100 to 100 are added to the logits
        before penalties and temperature.
      seed: seed of the tokens that are drawn. The tokens depend on it, and on nothing else in the batch. None: the
        engine draws one.
      n: completions, which need a temperature and share the pages of the prompt. There are at most the engine's
        `max_running`.
      stop: text that ends an answer and is not part of it.
      include_stop: whether a stop string that ends an answer is a part of it after all.
      skip_special_tokens: leave special tokens out of the text, but for those that end it.
      stop_token_ids: tokens that end it; they stay in the token ids, and out of the text.
      ignore_eos: go on after the model's own end tokens.
      grammar: that the text follows, in llguidance's form, see `longctx.serving.request.grammar`. The completion ends
        where the grammar allows nothing more; end tokens may come where it allows an end.
      allowed_token_ids: the only tokens that may come. None: all.
      bad_words: texts that may not come. Each is a token, or several of which the last may not follow the others.
      min_tokens: tokens before which nothing that ends the completion may come, but stop strings.
      logprobs: with each token, return its log probability and those of this many most likely ones (before biases,
        penalties, masks, temperature and the keep rules).
      prompt_logprobs: return the same for the prompt's tokens, but the first. Such a request computes its whole prompt.
      pooling: return an embedding of the prompt: hidden states after the last norm, their `"mean"` or the `"last"` one.
        It needs max_tokens=1. For the mean a request computes its whole prompt.

    Raises:
      TypeError, ValueError: a value out of range, or options that contradict each other.

    Examples:
      >>> from longctx.serving import SamplingParams
      >>> creative = SamplingParams(max_tokens=200, temperature=0.8, top_p=0.95, seed=1, stop=("\n\n",))
      >>> creative.level.name, SamplingParams().level.name
      ('FILTERS', 'GREEDY')
      >>> SamplingParams(top_p=1.5)
      Traceback (most recent call last):
          ...
      ValueError: top_p must be finite and 1e-06 to 1, got 1.5
    """

    max_tokens: _Positive = 16
    temperature: Annotated[float, Range(0, 1e6)] = 0.0
    top_k: _Positive | None = None
    top_p: Annotated[float, Range(1e-6, 1)] = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Range(1e-3, 1e3)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: _Count | None = None
    n: _Positive = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: _Count = 0
    logprobs: _Count | None = None
    prompt_logprobs: _Count | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"temperature must be 0, or 1e-6 to 1e6, got {self.temperature}")
        if not isinstance(self.stop, str | tuple | list) or not isinstance(self.stop_token_ids, tuple | list):
            raise TypeError("stop must be a string or some in a tuple, stop_token_ids a tuple of integers")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be strings, none of them empty, got {shown(self.stop)}")
        for text in stop:
            check_text("stop", text)
        ids = tuple(check_integer("stop_token_ids", token, 0, MAX_INT32) for token in self.stop_token_ids)
        self._check_masks()
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", tuple(_check_logit_bias(self.logit_bias)))
        if self.temperature == 0:
            if self.top_k is not None or self.top_p < 1 or self.min_p > 0:
                raise ValueError("top_k, top_p and min_p contradict temperature=0, which takes the most likely token")
            if self.n > 1:
                raise ValueError(f"n={self.n} contradicts temperature=0, which gives one completion")
        if self.pooling is not None and (self.max_tokens, self.n) != (1, 1):
            raise ValueError(f"pooling needs max_tokens=1 and n=1, got {self.max_tokens} and {self.n}")

    def _check_masks(self) -> None:
        if self.grammar is not None:
            if not isinstance(self.grammar, str) or not self.grammar:
                raise ValueError(f"grammar must be a text that is not empty, got {shown(self.grammar)}")
            check_text("grammar", self.grammar)
            if self.ignore_eos or self.allowed_token_ids is not None:
                name = "ignore_eos" if self.ignore_eos else "allowed_token_ids"
                raise ValueError(f"{name} contradicts grammar, which says what may come and where the text ends")
        if self.allowed_token_ids is not None:
            ids = self.allowed_token_ids
            if not isinstance(ids, tuple | list) or not ids:
                raise ValueError(f"allowed_token_ids must be token ids in a tuple, not empty, got {shown(ids)}")
            ids = tuple(check_integer("allowed_token_ids", token, 0, MAX_INT32) for token in ids)
            object.__setattr__(self, "allowed_token_ids", ids)
        if not isinstance(self.bad_words, tuple | list) or not all(isinstance(x, str) and x for x in self.bad_words):
            raise ValueError(f"bad_words must be texts in a tuple, none of them empty, got {shown(self.bad_words)}")
        object.__setattr__(self, "bad_words", tuple(check_text("bad_words", word) for word in self.bad_words))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")

    @property
    def has_mask(self) -> bool:
        """Whether some tokens may not come."""
        return self.needs_tokens or self.allowed_token_ids is not None or self.min_tokens > 0

    @property
    def needs_tokens(self) -> bool:
        """Whether which tokens may come depends on those before, so that the host has to know these."""
        return self.grammar is not None or bool(self.bad_words)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens of prompt or output."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_all_rows(self) -> bool:
        """Whether the whole prompt is computed, also where its pages are in the cache."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def level(self) -> SamplingLevel:
        """The lowest level of sampling that computes what is asked for."""
        if self.logprobs is not None:
            return SamplingLevel.LOGPROBS
        if self.top_k is not None or self.top_p < 1 or self.has_penalties or self.logit_bias:
            return SamplingLevel.FILTERS
        if self.has_mask:
            return SamplingLevel.MASKS
        return SamplingLevel.TEMPERATURE if self.temperature > 0 else SamplingLevel.GREEDY


def _check_logit_bias(value: object) -> Iterator[tuple[int, float]]:
    if not isinstance(value, tuple | list):
        raise TypeError(f"logit_bias must be (token, bias) pairs in a tuple, got {shown(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} pairs, got {len(value)}")
    tokens = set()
    for pair in value:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"logit_bias must be (token, bias) pairs in a tuple, got {shown(pair)} among them")
        token = check_integer("logit_bias's token", pair[0], 0, MAX_INT32)
        if token in tokens:
            raise ValueError(f"logit_bias must have each token once, got {token} twice")
        tokens.add(token)
        yield token, check_real(f"logit_bias of token {token}", pair[1], -100, 100)
