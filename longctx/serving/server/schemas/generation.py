"""The fields that completions and chats share, and `SamplingParams` of them."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.server.schemas.base import MAX_INT64, Body, TokenId, refuse
from longctx.serving.server.transfers import TransferParams

_MAX_STOP, _MAX_STOP_CHARACTERS, _MAX_BIASES, _MAX_CHOICES = 32, 1024, 300, 128
_LEAST_TOP_P = 1e-6
_OUTPUT_IS_TEXT = "outputs are text, without a grammar"

StopText = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Milliseconds = Annotated[float, Field(gt=0, le=1e12)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Body):
    type: str

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value != "text":
            raise ValueError(f"response_format must be of type text, got {value!r}")
        return value


class GenerationBody(Body):
    """Of OpenAI's API, and the extensions that other servers of open models have too.

    `temperature` 0 is greedy, whatever `top_p`, `top_k` and `min_p` are; `top_k` -1 or 0 keeps all tokens. `priority`:
    0 or more, higher is more urgent; the server may allow 0 alone. `ttft_ms`, `tpot_ms`: targets in milliseconds, of
    the first token and of those after it, which headers may bring too. `prompt_cache_key` names a conversation, whose
    next turn begins like this one; `cache_salt` keeps others from sharing this prompt's pages. `cache_id`: of
    `/v1/caches`, whose document comes before the prompt. `kv_transfer_params`: docs/kv_transfer.md.
    """

    model: str | None = None
    n: int | None = Field(None, ge=1, le=_MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=1e6)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    stop: StopText | Annotated[list[StopText], Field(max_length=_MAX_STOP, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1000, fail_fast=True)] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=_MAX_BIASES)
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    cache_salt: str | None = Field(None, max_length=1024)
    cache_id: str | None = Field(None, max_length=1024)
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: TransferParams | None = None

    # These would change the answer, and are refused by name.
    guided_json: Annotated[Any, refuse(_OUTPUT_IS_TEXT)] = None
    guided_regex: Annotated[Any, refuse(_OUTPUT_IS_TEXT)] = None
    guided_choice: Annotated[Any, refuse(_OUTPUT_IS_TEXT)] = None
    guided_grammar: Annotated[Any, refuse(_OUTPUT_IS_TEXT)] = None
    structured_outputs: Annotated[Any, refuse(_OUTPUT_IS_TEXT)] = None
    use_beam_search: Annotated[Any, refuse("there is no beam search")] = None

    @field_validator("min_tokens")
    @classmethod
    def _min_tokens(cls, value: int | None) -> int | None:
        if value is not None and value not in (0, 1):
            raise ValueError(f"min_tokens must be 0 or 1, as there is no way to forbid an end, got {value}")
        return value

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
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def sampling(self, max_tokens: int, logprobs: int | None, stop: tuple[str, ...], **more: Any) -> SamplingParams:
        """How tokens are drawn. n choices of a greedy answer are one, which is copied.

        Raises:
          TypeError, ValueError: a value is out of the engine's range.
        """
        given: dict[str, Any] = {"temperature": 1.0 if self.temperature is None else self.temperature}
        if not self.is_greedy:
            given |= {
                "n": self.num_choices,
                "top_p": 1.0 if self.top_p is None else max(self.top_p, _LEAST_TOP_P),
                "top_k": self.top_k if self.top_k is not None and self.top_k > 0 else None,
                "min_p": self.min_p or 0.0,
            }
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos"):
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        if self.logit_bias:
            given["logit_bias"] = tuple((int(token), bias) for token, bias in self.logit_bias.items())
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            seed=None if self.seed is None else self.seed % 2**31,
            stop=stops + stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            **given,
            **more,
        )


Role = Literal["system", "developer", "user", "assistant"]
