"""`CallReader`: makes the engine's requests of a body that a client sent. It has no state, and travels to processes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from longctx.models.tokenizer import TokenBytes, Tokenizer
from longctx.serving.engine.input_processor import InputProcessor
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.server.chat_format import ChatFormat
from longctx.serving.server.documents import Document, Prefix
from longctx.serving.server.errors import ApiError, not_servable, not_valid
from longctx.serving.server.logprobs import token_text
from longctx.serving.server.schemas.caches import CacheBody
from longctx.serving.server.schemas.chat import ChatBody, ChatFields
from longctx.serving.server.schemas.completions import CompletionBody
from longctx.serving.server.schemas.generation import GenerationBody
from longctx.serving.server.schemas.other import DetokenizeBody, TokenizeBody

Kind = Literal["completions", "chat", "tokenize", "detokenize", "cache"]
"""The methods of `CallReader`."""

_Model = TypeVar("_Model", bound=BaseModel)


class Origin(NamedTuple):
    """Where a call comes from: its tenant, the id of its requests, and targets that its headers bring, in seconds.

    `prefix`: of the cache that its body names.
    """

    tenant: str = ""
    request_id: str | None = None
    ttft: float | None = None
    tpot: float | None = None
    prefix: Prefix | None = None


class Call(NamedTuple):
    """What a client asks for, ready for the engine.

    Attributes:
      body: without its prompts.
      requests: one for each prompt.
      texts: of the prompts, where the answer repeats them.
      copies: how many choices each completion makes: more than one where all would be the same.
    """

    body: GenerationBody
    requests: list[PreparedRequest]
    texts: list[str]
    copies: int

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.copies * self.requests[0].request.sampling.n


@dataclass(frozen=True)
class CallRules:
    """What calls may ask for, of `ServerSettings` and the engine.

    Attributes:
      names: of the model; whoever names another one is refused.
      max_length: tokens of prompt and answer.
      min_tpot: seconds.
      has_sessions: whether the engine keeps pages for the next turn of a conversation.
    """

    names: tuple[str, ...]
    max_length: int
    vocab_size: int
    default_max_tokens: int
    max_prompts: int
    max_priority: int
    min_tpot: float
    has_sessions: bool


class CallReader:
    """Checks, tokenises and hashes.

    Its methods raise ApiError: whatever is wrong is the client's doing.
    """

    def __init__(
        self, input_processor: InputProcessor, tokenizer: Tokenizer, chat_format: ChatFormat, rules: CallRules
    ) -> None:
        self._input_processor, self._tokenizer = input_processor, tokenizer
        self.chat_format, self.rules = chat_format, rules

    def completions(self, body: bytes, origin: Origin) -> Call:
        """Read a body of `/v1/completions`."""
        fields = parse(CompletionBody, body)
        self._check_model(fields.model)
        before = _check_prefix(fields, origin.prefix)
        prompts = _prompts(fields)
        if len(prompts) > self.rules.max_prompts:
            raise ApiError(
                400, f"prompt must be at most {self.rules.max_prompts} prompts, got {len(prompts)}", "prompt"
            )
        more = {} if not fields.echo else {"prompt_logprobs": fields.logprobs}
        special = fields.add_special_tokens is not False and before is None
        tokens = [self._encode(prompt, special) for prompt in prompts]
        if before is not None:
            if before.tokens is None or fields.echo:
                wrong = "echo must be false" if fields.echo else "cache_id must be a cache of a prompt, not of messages"
                raise ApiError(400, f"{wrong}: the cache's tokens come before the prompt", "cache_id")
            tokens = [np.concatenate([before.tokens, ids]) for ids in tokens]
        wanted = None if fields.max_tokens is None else max(fields.max_tokens, 1)
        samplings = [
            fields.sampling(self._max_tokens(wanted, 16, len(ids)), fields.logprobs, (), **more) for ids in tokens
        ]
        texts = [self._text(prompt) for prompt in prompts] if fields.echo else []
        call = self._prepare(fields, tokens, samplings, origin, texts)
        return call._replace(body=fields.model_copy(update={"prompt": ""}))

    def chat(self, body: bytes, origin: Origin) -> Call:
        """Read a body of `/v1/chat/completions`."""
        fields = parse(ChatBody, body)
        self._check_model(fields.model)
        before = _check_prefix(fields, origin.prefix)
        if before is not None:
            if before.messages is None:
                raise ApiError(400, "cache_id must be a cache of messages, for a chat, not of a prompt", "cache_id")
            fields = fields.model_copy(update={"messages": [*before.messages, *fields.messages]})
        tokens = self._chat_tokens(fields)
        wanted = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        max_tokens = self._max_tokens(wanted, self.rules.default_max_tokens, len(tokens))
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        sampling = fields.sampling(max_tokens, logprobs, self.chat_format.stop)
        call = self._prepare(fields, [tokens], [sampling], origin, [])
        return call._replace(body=fields.model_copy(update={"messages": []}))

    def cache(self, body: bytes, origin: Origin) -> Document:
        """Read a body of `/v1/caches`."""
        fields = parse(CacheBody, body)
        self._check_model(fields.model)
        if fields.messages is not None:
            chat = ChatFields(messages=fields.messages, add_generation_prompt=False)
            tokens = self._encode(self.chat_format.tokens(self.chat_format.render(chat)), False)
        else:
            assert fields.prompt is not None
            tokens = self._encode(fields.prompt, fields.add_special_tokens is not False)
        prompt: Any = tokens
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(prompt, sampling, origin.request_id, tenant=origin.tenant, priority=-1)
        prepared = self._input_processor.prepare(request)
        return Document(tokens if fields.messages is None else None, fields.messages, prepared, fields.ttl)

    def tokenize(self, body: bytes, origin: Origin) -> tuple[list[int], list[str] | None]:
        """Read a body of `/tokenize`: the tokens, and what each is, if that is asked for."""
        fields = parse(TokenizeBody, body)
        if fields.messages is not None:
            chat = ChatFields(messages=fields.messages, add_generation_prompt=fields.add_generation_prompt)
            tokens = self.chat_format.tokens(self.chat_format.render(chat))
        else:
            tokens = self._tokenizer.encode(fields.prompt or "", fields.add_special_tokens is not False)
        names = TokenBytes(self._tokenizer)
        return tokens, [token_text(names.of(token)) for token in tokens] if fields.return_token_strs else None

    def detokenize(self, body: bytes, origin: Origin) -> str:
        """Read a body of `/detokenize`: the text."""
        tokens = parse(DetokenizeBody, body).tokens
        if tokens and max(tokens) >= self.rules.vocab_size:
            raise ApiError(400, f"tokens must be below {self.rules.vocab_size}, got {max(tokens)}", "tokens")
        return self._tokenizer.decode(tokens)

    def _chat_tokens(self, fields: ChatBody) -> np.ndarray:
        return np.array(self.chat_format.tokens(self.chat_format.render(fields)), np.int32)

    def _check_model(self, name: str | None) -> None:
        if name and name not in self.rules.names:
            raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")

    def _encode(self, prompt: str | Sequence[int], special: bool) -> np.ndarray:
        return np.array(self._tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt, np.int32)

    def _text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _max_tokens(self, wanted: int | None, default: int, num_prompt: int) -> int:
        """What is asked for; by default as much as there is room for, which the engine checks."""
        return max(1, min(default, self.rules.max_length - num_prompt)) if wanted is None else wanted

    def _prepare(
        self,
        fields: GenerationBody,
        tokens: list[np.ndarray],
        samplings: list[SamplingParams],
        origin: Origin,
        texts: list[str],
    ) -> Call:
        requests = []
        for number, (ids, sampling) in enumerate(zip(tokens, samplings, strict=True)):
            request = self._request(fields, ids, sampling, origin, None if len(tokens) == 1 else number)
            prepared = self._input_processor.prepare(request)
            # The tokens are there once, and travel once.
            prompt: Any = prepared.tokens
            requests.append(prepared._replace(request=dataclasses.replace(request, prompt=prompt)))
        return Call(fields, requests, texts, fields.num_choices if fields.is_greedy else 1)

    def _request(
        self, fields: GenerationBody, ids: np.ndarray, sampling: SamplingParams, origin: Origin, number: int | None
    ) -> Request:
        ttft, tpot = _target(origin.ttft, fields.ttft_ms), _target(origin.tpot, fields.tpot_ms)
        request_id = origin.request_id
        if request_id is not None and number is not None:
            request_id = f"{request_id}-{number}"
        more: dict[str, Any] = {"cache_salt": fields.cache_salt} if fields.cache_salt else {}
        return Request(
            cast(Sequence[int], ids),  # an array is a sequence in all but name
            sampling,
            request_id,
            session_id=fields.prompt_cache_key if self.rules.has_sessions and number is None else None,
            tenant=origin.tenant,
            ttft_deadline=ttft,
            tpot_target=None if tpot is None else max(tpot, self.rules.min_tpot),
            priority=min(max(fields.priority or 0, 0), self.rules.max_priority),
            **more,
        )


def parse(model: type[_Model], body: bytes) -> _Model:
    """The fields of a body; ApiError if it is no JSON, or not of these fields and types."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise not_valid(error) from None


def read(reader: CallReader, kind: Kind, body: bytes, origin: Origin) -> Any:
    """Read a body by the method of the reader; ApiError if it can't be served."""
    try:
        return getattr(reader, kind)(body, origin)
    except (TypeError, ValueError) as error:
        raise not_servable(error) from None


def cache_named(body: bytes) -> str | None:
    """The cache that a body names; None: none, or the body is none, of which its reader says what is wrong."""
    if b"cache_id" not in body and b"\\u" not in body:
        return None
    try:
        return msgspec.json.decode(body, type=_Named).cache_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


class _Named(msgspec.Struct):
    cache_id: str | None = None


def _check_prefix(fields: GenerationBody, prefix: Prefix | None) -> Prefix | None:
    """What comes before the prompt; ApiError if it is not that of the cache that a body names."""
    if fields.cache_id is None:
        return None
    if prefix is None or prefix.cache_id != fields.cache_id:
        raise ApiError(404, f"there is no cache {fields.cache_id[:80]!r}", "cache_id", "cache_not_found")
    if fields.cache_salt:
        raise ApiError(400, "cache_salt contradicts cache_id: a cache's pages have no salt", "cache_salt")
    return prefix


def _prompts(fields: CompletionBody) -> list[str | list[int]]:
    prompt = fields.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [cast(str | list[int], prompt)]
    return cast(list[str | list[int]], prompt)


def _target(header: float | None, milliseconds: float | None) -> float | None:
    """A target in seconds; a header, which a gateway may have set, comes before the body."""
    return header if header is not None else None if milliseconds is None else milliseconds / 1000
