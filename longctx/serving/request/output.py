"""Results of requests: `Event`s as tokens come, and an `Output` at the end of each completion."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

FinishReason = Literal["stop", "length", "cancelled", "error", "moved"]


class TokenLogprob(NamedTuple):
    """A token's log probability, and the most likely tokens in its place with theirs, descending.

    Attributes:
      logprob: natural logarithm of the token's probability.
      top: (token id, log probability) of the most likely ones.

    Examples:
      >>> import math
      >>> from longctx.serving import TokenLogprob
      >>> drawn = TokenLogprob(logprob=-1.2, top=((17, -0.5), (42, -1.2)))  # as an `Output` has it for each token
      >>> likeliest, _ = drawn.top[0]
      >>> likeliest, round(math.exp(drawn.logprob), 2)
      (17, 0.3)
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Logprobs(Sequence[TokenLogprob]):
    """Log probabilities of tokens in order, in arrays of float32: a value takes 8 bytes, and a token 12 more.

    Args:
      values: the first ones.

    Examples:
      >>> from longctx.serving import TokenLogprob
      >>> from longctx.serving.request.output import Logprobs
      >>> kept = Logprobs([TokenLogprob(-0.5, ((17, -0.5), (42, -1.25)))])
      >>> kept.append(TokenLogprob(-2.0, ()))
      >>> kept[0], len(kept)
      (TokenLogprob(logprob=-0.5, top=((17, -0.5), (42, -1.25))), 2)
    """

    __slots__ = ("_ends", "_own", "_top", "_top_ids")

    def __init__(self, values: Iterable[TokenLogprob] = ()) -> None:
        self._own, self._top, self._top_ids = array("f"), array("f"), array("i")
        self._ends = array("q")  # of each token's most likely ones among those of all
        self.extend(values)

    def append(self, value: TokenLogprob) -> None:
        self._own.append(value.logprob)
        for token, logprob in value.top:
            self._top_ids.append(token)
            self._top.append(logprob)
        self._ends.append(len(self._top))

    def extend(self, values: Iterable[TokenLogprob]) -> None:
        if isinstance(values, Logprobs):
            before = len(self._top)
            self._ends.extend(before + end for end in values._ends)
            self._own.extend(values._own)
            self._top.extend(values._top)
            self._top_ids.extend(values._top_ids)
            return
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self._own)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob]:
        numbers = range(len(self._own))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        top = slice(self._ends[numbers - 1] if numbers else 0, self._ends[numbers])
        return TokenLogprob(self._own[numbers], tuple(zip(self._top_ids[top], self._top[top], strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(TokenLogprob.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Logprobs({list(self)})"


@dataclass
class Metrics:
    """The metrics of one completion. Times are seconds on the engine's clock.

    Attributes:
      arrival, admitted, first_token, last_token, finished: seconds of the engine's clock; None: it never came to that.
      prompt_tokens, output_tokens: how many.
      cached_tokens: tokens of the prompt whose keys and values were found in the cache.
      preemptions: how often it was preempted (optimistic admission).
      recomputed_tokens: tokens that were computed again because of that: those that it no longer found in the cache.
      longest_gap: seconds, at most, between two of its tokens.
      ttft_deadline, tpot_target: what was promised when it came, by its request or by default: seconds, both.
      slack: when it was admitted, the share that was left of the time to its deadline after its prompt (Medha, 4.2).
      passed_by: how many less urgent sequences got memory while it found none.
      loaded_tokens: those of them that came from beyond the devices.

    Source:
      Medha, 4.2 (the relative slack); Mnemosyne, 2.2 (TTFT, and TPOT as TBT).

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> [output] = engine.generate([[7] * 1000], SamplingParams(max_tokens=11, ignore_eos=True))
      >>> metrics = output.metrics
      >>> round(metrics.ttft, 3), round(metrics.tpot, 3), metrics.prompt_tokens  # four chunks of up to 256 tokens
      (0.04, 0.01, 1000)
    """

    arrival: float
    prompt_tokens: int
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    last_token: float | None = None
    longest_gap: float = 0.0
    ttft_deadline: float | None = None
    tpot_target: float | None = None
    slack: float | None = None
    passed_by: int = 0
    loaded_tokens: int = 0

    def note_token(self, now: float) -> None:
        """A token has come."""
        self.output_tokens += 1
        if self.last_token is None:
            self.first_token = now
        elif now - self.last_token > self.longest_gap:
            self.longest_gap = now - self.last_token
        self.last_token = now

    def note_tokens(self, count: int, first: float, last: float, longest: float) -> None:
        """Note tokens after one that was noted, as `note_token` does one by one.

        Args:
          count: of tokens.
          first, last: when the first and the last of them came, in seconds.
          longest: of the seconds between two of them.
        """
        assert self.last_token is not None
        self.longest_gap = max(self.longest_gap, first - self.last_token, longest)
        self.output_tokens += count
        self.last_token = last

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first."""
        if self.finished is None or self.first_token is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def kept_ttft(self) -> bool | None:
        """Whether the first token came in time; None if nothing was due, or none came."""
        return None if self.ttft is None or self.ttft_deadline is None else self.ttft <= self.ttft_deadline

    @property
    def kept_tpot(self) -> bool | None:
        """Whether the mean time per token kept its target; None if there was none, or one token at most."""
        return None if self.tpot is None or self.tpot_target is None else self.tpot <= self.tpot_target


class Lease(NamedTuple):
    """Pages of a completion that an engine keeps for another one: of `length` tokens."""

    lease_id: str
    length: int


@dataclass(frozen=True)
class Output:
    """One completion, whole. A request with n > 1 has n of them, `index` 0 to n - 1.

    Attributes:
      request_id: of its request.
      index: which of the request's n completions, from 0.
      token_ids: what was generated, a stop token included.
      text: of these tokens, without a stop token, and up to a stop string. Empty where there is no tokenizer.
      finish_reason: `"stop"` (a stop token or string), `"length"` (max_tokens), `"cancelled"`, `"error"`, or `"moved"`
        (another engine goes on with it).
      metrics: its times and counts.
      logprobs: of each token, if asked for.
      prompt_logprobs: of the prompt's tokens but the first, if asked for; with the first completion (`index` 0) alone.
      error: what went wrong, a sentence, where `finish_reason` is `"error"`: the logits of a token were not finite, or
        a step of the engine failed.
      seed: that its tokens were drawn with.
      lease: what the engine keeps of it, for a request with `lease`.
      embedding: of the prompt, float32 `[D]`, for a request with `pooling`.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> sampling = SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=3)
      >>> outputs = engine.generate([[7] * 100], sampling)
      >>> [(output.index, len(output.token_ids), output.finish_reason) for output in outputs]
      [(0, 4, 'length'), (1, 4, 'length')]
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: Metrics
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    error: str | None = None
    seed: int = 0
    lease: Lease | None = None
    embedding: Sequence[float] | None = None


@dataclass(slots=True)
class Event:
    """Result of one step for a completion. `text` has become certain; `output` comes with the last event.

    Attributes:
      request_id: of its request.
      index: which of the request's n completions, from 0.
      token_ids: the step's tokens.
      text: what of the completion's text has become certain: bytes of a character that is not whole, or what may be the
        beginning of a stop string, come later.
      logprobs: of each of the tokens, if asked for.
      output: the whole completion, with its last event; None before.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> events = [*engine.stream([[7] * 100], SamplingParams(max_tokens=3))]
      >>> [(event.request_id, len(event.token_ids), event.output is not None) for event in events]
      [('request-0', 1, False), ('request-0', 1, False), ('request-0', 1, True)]
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    output: Output | None = None
