"""`Request`, checked when it is made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from longctx.models.validation import MAX_INT32, check_integer, check_real, shown
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.validation import check_text

# A deadline is between these.
_SECONDS = 1e-6, 1e9
_LOGPROB_BYTES = 128  # 8 in an array, and 30 to 60 in JSON, which is there twice while it is sent


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
      cache_salt: nor do requests of one tenant with different salts, nor are sessions found under another one.
      ttft_deadline: seconds from arrival within which the first token is wanted.
      tpot_target: seconds between later tokens that are wanted at most.
      priority: higher is more urgent; -1 comes after all who don't say. It comes before any policy.
      retain: pairs of tokens and seconds: for so long are the pages of the prompt's first tokens kept in host memory
        and on disk, where an engine has these tiers. A server lets a tenant keep as much as its quota.
      lease: keep its pages for another engine, which goes on with it: under this id, followed by the index of the
        completion if there are several. `Handoff.of` its outputs has what else that engine needs.
      stream_id: of the stream of a server's client, which another connection may resume; None: none may.

    Raises:
      TypeError, ValueError: a field is of the wrong type or out of range; the message names it.

    Source:
      Medha, 4.2 (deadlines); Mooncake, 2 (SLOs of TTFT and TBT).

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, Request, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> turn = Request([7] * 150, SamplingParams(max_tokens=20, ignore_eos=True), session_id="chat")
      >>> [output] = engine.generate([turn])
      >>> prompt = [*turn.prompt, *output.token_ids, 8, 9]  # what was said, and the next question
      >>> [output] = engine.generate([Request(prompt, session_id="chat")])
      >>> output.metrics.prompt_tokens, output.metrics.cached_tokens  # a partial page was found too
      (172, 169)
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    session_id: str | None = None
    tenant: str = ""
    cache_salt: str = ""
    ttft_deadline: float | None = None
    tpot_target: float | None = None
    priority: int = 0
    retain: tuple[tuple[int, float], ...] = ()
    lease: str | None = None
    stream_id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingParams):
            raise TypeError(f"sampling must be SamplingParams, got {type(self.sampling).__name__}")
        for name in ("request_id", "session_id", "tenant", "cache_salt", "lease", "stream_id"):
            value = getattr(self, name)
            if value is not None or name in ("tenant", "cache_salt"):
                check_text(name, value)
        for name in ("ttft_deadline", "tpot_target"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_real(name, value, *_SECONDS))
        object.__setattr__(self, "priority", check_integer("priority", self.priority, -1, MAX_INT32))
        if not isinstance(self.retain, tuple | list):
            raise TypeError(f"retain must be pairs of tokens and seconds, got {shown(self.retain)}")
        object.__setattr__(self, "retain", tuple(map(_kept, self.retain)))


def _kept(pair: tuple[int, float]) -> tuple[int, float]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"retain must have pairs of tokens and seconds, got {shown(pair)}")
    return check_integer("retain's tokens", pair[0], 1, MAX_INT32), check_real("retain's seconds", pair[1], *_SECONDS)


class PreparedRequest(NamedTuple):
    """A request that has been checked, tokenised and hashed.

    `Engine.prepare` makes it; it may travel between threads and processes.

    Attributes:
      request: as it was.
      tokens: of its prompt, int32 `[T]`.
      keys: hashes of its full pages, in order, each of all tokens up to its page's end.
      prepared_for: fingerprint of the engines that may take it.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, Request
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> prepared = engine.prepare(Request([7] * 200, request_id="mine"))
      >>> prepared.tokens.dtype, prepared.tokens.shape, len(prepared.keys)  # three full pages of 64
      (dtype('int32'), (200,), 3)
      >>> engine.submit(prepared)
      'mine'
    """

    request: Request
    tokens: np.ndarray
    keys: list[bytes]
    prepared_for: bytes

    @property
    def may_share(self) -> bool:
        """Whether it may begin with pages that others have computed: some results need all rows of the prompt."""
        return not self.request.sampling.needs_all_rows

    @property
    def logprob_bytes(self) -> int:
        """Bytes that its log probabilities take at most, as arrays and in an answer: about 128 for each number."""
        params, numbers = self.request.sampling, 0
        if params.logprobs is not None:
            numbers += params.n * params.max_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            numbers += len(self.tokens) * (1 + params.prompt_logprobs)
        return _LOGPROB_BYTES * numbers

    @property
    def shared_keys(self) -> list[bytes]:
        """The keys of the pages that may be found in the cache."""
        return self.keys if self.may_share else []


Prompt = str | Sequence[int] | Request


def read_requests(
    prompts: Prompt | Iterable[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
) -> list[Request]:
    """Yield the requests that `Engine.generate` is given, one by one.

    Raises:
      TypeError, ValueError: it is none of what that takes.
    """
    if not isinstance(prompts, Iterable | Request) or isinstance(prompts, bytes | bytearray | set | frozenset | dict):
        raise TypeError(f"prompts must be text, token ids, a Request, or several of them, got {shown(prompts)}")
    if not isinstance(sampling, SamplingParams | list | tuple | None):
        raise TypeError(f"sampling must be SamplingParams or a list of them, got {shown(sampling)}")
    listed: list[Any] = [prompts] if isinstance(prompts, str | Request) else list(prompts)
    if listed and all(isinstance(x, int | np.integer) for x in listed):
        listed = [listed]  # one prompt of token ids
    if sampling is None or isinstance(sampling, SamplingParams):
        each: list[SamplingParams | None] = [sampling] * len(listed)
    else:
        each = list(sampling)
        if len(each) != len(listed):
            raise ValueError(f"sampling must be one for all prompts or {len(listed)} of them, got {len(each)}")
    requests = []
    for prompt, params in zip(listed, each, strict=True):
        if isinstance(prompt, Request):
            if params is not None:
                raise ValueError("sampling must be None for a Request, which brings its own")
            requests.append(prompt)
        else:
            requests.append(Request(prompt, SamplingParams() if params is None else params))
    return requests
