"""Bodies of requests: JSON of strict types. Fields that are not known are passed over, and those of answers are named.

Ranges of numbers that `SamplingParams` and `Request` check are not repeated here.
"""

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Base64Bytes,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.server.known_fields import PASSED_OVER, REFUSED, Refused, unknown_fields
from longctx.serving.server.structured import GrammarFields

MAX_INT64 = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    """Body with strict types: `"5"` is no number, and NaN is none either."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class OpenBody(Body):
    """Body whose other fields are looked at: those that would change the answer are refused, unknown ones named.

    Routers add fields of their own.
    """

    model_config = ConfigDict(extra="allow")

    refused_fields: ClassVar[Mapping[str, Refused]] = REFUSED
    harmless_fields: ClassVar[Collection[str]] = PASSED_OVER
    _unknown: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _name_others(self) -> Self:
        given = self.__pydantic_extra__ or {}
        self._unknown = tuple(unknown_fields(given, self.refused_fields, self.harmless_fields))
        self.__pydantic_extra__ = {}
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields that no server is known to have; they are passed over."""
        return self._unknown


_bodies: dict[str, type[BaseModel]] = {}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return OpenAPI's description of a body that a route reads by itself, for `openapi_extra`."""
    _bodies[model.__name__] = model
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def bodies_described() -> dict[str, Any]:
    """Return the schemas of all bodies that `body_of` was asked for, for OpenAPI's `components`."""
    schemas: dict[str, Any] = {}
    for name, model in _bodies.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
    return schemas


def refuse(why: str) -> BeforeValidator:
    """Refuse a field that is not supported and would change the answer; null, false and empty values pass."""

    def check(value: Any) -> Any:
        if value is None or value is False or value == [] or value == {}:
            return None
        raise ValueError(why)

    return BeforeValidator(check)


def must_be(known: Collection[str], why: str) -> AfterValidator:
    """Refuse a text that is not one of those known: `why` has a place for what it is."""

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(why.format(repr(value[:40])))
        return value

    return AfterValidator(check)


_DAY = 86_400.0
_MAX_STOP, _MAX_STOP_CHARACTERS = 32, 1024
_LEAST_TOP_P = 1e-6
MAX_TOKEN_IDS, _MAX_BAD_WORDS = 100_000, 256
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_GREEDY: dict[str, Any] = {"n": 1, "top_k": None, "top_p": 1.0, "min_p": 0.0}
_SAMPLING = ("temperature", "ignore_eos", *_GREEDY, *_PENALTIES)
_NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})
_ALIASES = (
    ("repetition_penalty", "repeat_penalty"),
    ("max_tokens", "max_completion_tokens"),
    ("max_tokens", "n_predict"),
)

StopText = Annotated[str, Field(max_length=_MAX_STOP_CHARACTERS)]
Milliseconds = Annotated[float, Field(gt=0, le=1e12)]


_TTLS, _LONGEST_TTL = {"5m": 300.0, "1h": 3600.0}, 1e9


class CacheControl(Body):
    """Wish that pages of a prompt are kept beyond the devices: `ttl` is `5m`, `1h`, or a number of seconds."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str | float = "5m"

    @field_validator("ttl", mode="before")
    @classmethod
    def _is_time(cls, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LONGEST_TTL
        if not is_number and value not in _TTLS:
            raise ValueError(f"must be 5m, 1h, or seconds, more than 0 and at most {_LONGEST_TTL:g}")
        return value

    @property
    def seconds(self) -> float:
        return _TTLS[self.ttl] if isinstance(self.ttl, str) else self.ttl


class StreamOptions(Body):
    """`resumable`: events have ids, with which another connection goes on: docs/cluster.md."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    resumable: bool | None = None


class PagePrefix(Body):
    """A server that has or reads the first tokens of a prompt.

    Attributes:
      url: of its HTTP.
      tokens: how many; None: all full pages before the prompt's last token.
      seconds: predicted until it has read them; None: unknown.
      grant: see `Prefill`.
    """

    url: Annotated[str, Field(max_length=2048)]
    tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    seconds: Annotated[float, Field(ge=0, le=1e6)] | None = None
    grant: Annotated[str, Field(max_length=4096)] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return self.model_dump(exclude_none=True)


class Prefill(Body):
    """Server that reads the prompt of a request which another server sends.

    Attributes:
      url: of that server; None: this one.
      prefix: the source of the first pages; None: the server that reads the prompt has or computes them.
      seconds: predicted until it has been read; None: unknown.
      grant: opens that server for the tenant of the request, see `make_grant`. None: the key of this request does.
    """

    url: Annotated[str, Field(max_length=2048)] | None = None
    prefix: PagePrefix | None = None
    seconds: Annotated[float, Field(ge=0, le=1e6)] | None = None
    grant: Annotated[str, Field(max_length=4096)] | None = None


class TransferParams(Body):
    """`kv_transfer_params` of a body. Fields that are not here are those of other engines.

    Attributes:
      remote_followers: `host:port` where the other processes of that engine send their parts of the pages.
      signature: by the secret of page keys, over where pages are fetched, and which.
      kv_dtype: of keys and values in the pages.
      prefix: from where the first pages of the prompt come.
      is_cached: nothing is to be computed: pages that are here are lent, and if they are not all here, none.
      sampling: how the first token is drawn, of the request that another server goes on with.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_followers: Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=1023)] = []
    signature: Annotated[str, Field(max_length=64)] | None = None
    lease: str | None = None
    fingerprint: str | None = None
    kv_dtype: Annotated[str, Field(max_length=40)] | None = None
    handoff: dict[str, Any] | None = None
    prefix: PagePrefix | None = None
    is_cached: bool | None = None
    sampling: SamplingParams | None = None


class GenerationBody(OpenBody, GrammarFields):
    """Fields of completions and chats: OpenAI's, and the extensions that other servers of open models have too.

    `temperature` 0 is greedy, whatever `top_p`, `top_k` and `min_p` are; `top_k` -1 or 0 keeps all tokens. `priority`:
    -1 or more, higher is more urgent; the server may allow 0 at most. `ttft_ms`, `tpot_ms`: targets in milliseconds, of
    the first token and of those after it, which headers may bring too. `prompt_cache_key` names a conversation, whose
    next turn begins like this one; `cache_salt` keeps others from sharing this prompt's pages. `cache_id`: of
    `/v1/caches`, whose document comes before the prompt. `cache_control`, `prompt_cache_retention`: the prompt's pages
    are kept for a time. `kv_transfer_params`: docs/kv_transfer.md.
    """

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    stop: StopText | Annotated[list[StopText], Field(max_length=_MAX_STOP, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1000, fail_fast=True)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=_MAX_BAD_WORDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-1, le=MAX_INT64)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    cache_salt: str | None = Field(None, max_length=1024)
    cache_id: str | None = Field(None, max_length=1024)
    cache_control: CacheControl | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: TransferParams | None = None

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token in value or {}:
            if not (token.isascii() and token.isdecimal() and len(token) <= 10):
                raise ValueError(f"logit_bias must have token ids as keys, got {token[:20]!r}")
        return value

    @model_validator(mode="after")
    def _stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must come with stream: true")
        for newer, older in _ALIASES:
            given, alias = getattr(self, newer), getattr(self, older)
            if alias is not None and given not in (None, alias):
                raise ValueError(f"{older} and {newer} contradict each other: {alias} and {given}")
            if alias is not None and given is None:
                object.__setattr__(self, newer, alias)
        return self

    @property
    def retention(self) -> float:
        """Seconds for which pages of the whole prompt are kept; 0: as long as there is room."""
        kept = 0.0 if self.cache_control is None else self.cache_control.seconds
        return max(kept, _DAY if self.prompt_cache_retention == "24h" else 0.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    def sampling(
        self,
        max_tokens: int,
        logprobs: int | None,
        stop: tuple[str, ...],
        defaults: Mapping[str, float] = _NO_DEFAULTS,
        grammar: str | None = None,
        skip_special: bool = True,
        **more: Any,
    ) -> SamplingParams:
        """Return the sampling parameters. n choices of a greedy answer are one, which is copied.

        Args:
          defaults: of the checkpoint, by name.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given: dict[str, Any] = {"temperature": 1.0}
        if self.temperature is None:
            given |= defaults
        elif "repetition_penalty" in defaults:
            given["repetition_penalty"] = defaults["repetition_penalty"]
        given |= {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.top_p is not None and self.top_p >= 0:
            given["top_p"] = max(self.top_p, _LEAST_TOP_P)
        if self.top_k in (-1, 0):
            given.pop("top_k", None)
        if self.allowed_token_ids is not None:
            given["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.logit_bias:
            given["logit_bias"] = tuple((int(token), bias) for token, bias in self.logit_bias.items())
        is_mixed = self.is_greedy and not _GREEDY.keys().isdisjoint(given)
        if is_mixed:  # fields that mean nothing then are checked all the same
            given["temperature"] = 1.0
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=None if self.seed is None else self.seed % 2**31,
            stop=stops + stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            bad_words=tuple(self.bad_words or ()),
            min_tokens=self.min_tokens or 0,
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=skip_special and self.skip_special_tokens is not False,
            grammar=grammar,
            **given,
            **more,
        )
        return dataclasses.replace(params, temperature=0.0, **_GREEDY) if is_mixed else params


Prompt = Annotated[
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
    Field(union_mode="left_to_right"),
]


class CompletionBody(GenerationBody):
    """`prompt`: a text, token ids, or a list of either. With `echo`, `max_tokens` may be 0.

    `parse_special`: names of special tokens in a text are these tokens, and not plain text.
    """

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None

    @model_validator(mode="after")
    def _some_tokens(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or echo true")
        if self.stream and self.echo and self.logprobs is not None:  # those of the prompt come with its end
            raise ValueError("echo must come with stream: false, or without logprobs")
        return self


BlockHash = Annotated[int, Field(ge=0, lt=2**64)]


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class AbortBody(Body):
    """Ids as the clients sent them in `x-request-id`, or as they stand in answers."""

    request_ids: Annotated[list[str], Field(max_length=1000, fail_fast=True)]


class ResumeBody(Body):
    """Request of another server, with what that has computed of it, and the server that reads its prompt.

    `tokens`: the ids of its prompt as base64 of int32, little-endian, instead of `prompt`, which may be empty then.
    """

    request: Request
    tokens: Base64Bytes | None = None
    kv_transfer_params: TransferParams | None = None
    prefill: Prefill | None = None


class DrainBody(Body):
    """`drain`: take no new requests from now on; false: take some again."""

    drain: bool = True


class SwapBody(Body):
    """`keys`: of blocks, as KV events have them. `tier`: which they leave if they are not in use there.

    `pins`: they may leave, as what asked to keep them needs them no more.
    """

    keys: Annotated[list[BlockHash], Field(max_length=1_000_000, fail_fast=True)]
    tier: Literal["device", "host", "pins"]
