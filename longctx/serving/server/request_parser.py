"""Parser of requests: makes the engine's requests of the bodies that clients send."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from longctx.models.chat_template import PLAIN_STOP, ChatTemplate, has_template
from longctx.models.plain_text import PlainTextEncoder
from longctx.models.tokenizer import HFTokenizer, TokenBytes, Tokenizer, utf8_bytes
from longctx.serving.config import EngineConfig
from longctx.serving.engine.input_processor import InputProcessor
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.server.answer_parts import AnswerReader
from longctx.serving.server.embeddings import EmbeddingBody
from longctx.serving.server.errors import ApiError, no_such_model, not_servable, not_valid
from longctx.serving.server.responses_body import History, ResponsesBody, in_names_of_responses, response_id
from longctx.serving.server.schemas import (
    Body,
    CacheBody,
    ChatBody,
    ChatFields,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Message,
    TokenizeBody,
)
from longctx.serving.server.settings import ServerSettings

Kind = Literal["completions", "chat", "responses", "embeddings", "tokenize", "detokenize", "cache"]
"""The methods of `RequestParser`."""

_Model = TypeVar("_Model", bound=BaseModel)

_NO_TARGET = 1e9  # seconds
# What requests are refused by name for, or a template gets from its tokenizer.
_RESERVED = frozenset({"messages", "add_generation_prompt", "special_tokens", "tools", "functions", "chat_template"})
_RESERVED_END = "_token"  # of the names of special tokens
_TYPICAL = 8  # characters of a token that few texts have in the mean


@dataclass(frozen=True)
class ChatFormat:
    """Rendering of chats: by a template, or without one as plain questions and answers. It travels to processes."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None

    @property
    def has_template(self) -> bool:
        return self.template is not None or has_template(self.tokenizer)

    @property
    def stop(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return () if self.has_template else PLAIN_STOP

    @functools.cached_property
    def encoder(self) -> PlainTextEncoder:
        """Encoder of clients' texts, and of chats."""
        return PlainTextEncoder(self.tokenizer)

    def tokens(self, fields: ChatFields, check: Callable[[str], object]) -> np.ndarray:
        """Return the prompt of a chat, int32 `[T]`; its special tokens are those of the template, and of no message.

        `check` is called with its text before that is tokenised.
        """
        variables = dict(fields.chat_template_kwargs or {})
        reserved = sorted(x for x in variables if x in _RESERVED or x.endswith(_RESERVED_END))
        if reserved:
            raise ValueError(f"chat_template_kwargs must not have {', '.join(reserved)[:200]}")
        asks = fields.add_generation_prompt is not False
        if not self.has_template:
            text = _render_plainly(fields.messages, asks)
            check(text)
            return np.array(self.encoder.encode(text), np.int32)

        def render(messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
            if self.template is None:
                text = self.tokenizer.apply_chat_template(messages, asks, **variables)
            else:
                special = self.tokenizer.special_tokens if isinstance(self.tokenizer, HFTokenizer) else {}
                text = self.template.render(messages, asks, special, **variables)
            check(text)
            return text

        messages = [_to_template(message) for message in fields.messages]
        return np.array(self.encoder.encode_chat(render, messages, variables), np.int32)


def _to_template(message: Message) -> dict[str, str]:
    # Templates know the older name of this role.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text} | ({"name": message.name} if message.name else {})


def _render_plainly(messages: Sequence[Message], asks: bool) -> str:
    """Render a chat as `longctx chat` does: the system's text, such as a document, then questions and answers."""
    text = ""
    for message in messages:
        if message.role in ("system", "developer"):
            text += ("\n" if text else "") + message.text
        else:
            text += f"\nQ: {message.text}" if message.role == "user" else f"\nA: {message.text}"
    return f"{text}\nA: " if asks else text


class Prefix(NamedTuple):
    """Beginning of the prompts of requests that name a cache: tokens `[T]`, or messages of a chat.

    Attributes:
      num_bytes: of text and tokens, about: parsing a request with it takes as long as with this many bytes.
    """

    cache_id: str
    tokens: np.ndarray | None
    messages: list[Message] | None
    num_bytes: int


class Document(NamedTuple):
    """A checked document of a cache: its tokens `[T]` or messages, the request that reads it, and its life in seconds.

    It is plain data, which may travel to other processes.
    """

    tokens: np.ndarray | None
    messages: list[Message] | None
    prepared: PreparedRequest
    ttl: float

    def prefix(self, cache_id: str) -> Prefix:
        """Return the prefix of prompts that a cache of this document makes."""
        text = 0 if self.messages is None else sum(len(message.text) for message in self.messages)
        return Prefix(cache_id, self.tokens, self.messages, text + 4 * len(self.prepared.tokens))


class Origin(NamedTuple):
    """Source of a call: its tenant, the id of its requests, and targets that its headers bring, in seconds.

    `prefix`: of the cache that its body names. `history`: stored items that it names.
    """

    tenant: str = ""
    request_id: str | None = None
    ttft: float | None = None
    tpot: float | None = None
    prefix: Prefix | None = None
    history: History | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes, about, that are parsed beside the body."""
        prefix = 0 if self.prefix is None else self.prefix.num_bytes
        return prefix + (0 if self.history is None else self.history.num_bytes)


class ParsedCall(NamedTuple):
    """A client's call, ready for the engine.

    Attributes:
      body: without its prompts.
      requests: one for each prompt.
      texts: of the prompts, where the answer repeats them.
      copies: how many choices each completion makes: more than one where all would be the same.
      source: the body of another API that the chat was made of.
    """

    body: GenerationBody
    requests: list[PreparedRequest]
    texts: list[str]
    copies: int
    source: Body | None = None

    def new_reader(self) -> AnswerReader:
        """Return a reader of the text of one completion."""
        return AnswerReader()

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.copies * self.requests[0].request.sampling.n


class RequestParser:
    """Checks, tokenises and hashes. It has no state, and travels to processes.

    Its methods raise ApiError, TypeError or ValueError for an error of the client: call them through `parse_body`.
    """

    def __init__(
        self,
        input_processor: InputProcessor,
        chat_format: ChatFormat,
        names: tuple[str, ...],
        settings: ServerSettings,
        config: EngineConfig,
        max_length: int,
        vocab_size: int,
        tpot: float | None,
    ) -> None:
        self._input_processor, self.chat_format, self.tokenizer = input_processor, chat_format, chat_format.tokenizer
        self.names, self.max_length, self.vocab_size = names, max_length, vocab_size
        self._settings = dataclasses.replace(settings, api_keys=(), admin_keys=())
        self._has_sessions = config.prefix_cache
        self._longest_token = chat_format.encoder.longest_token  # found out before it travels
        least = tpot if settings.min_tpot is None else settings.min_tpot
        self._min_tpot = _NO_TARGET if least is None else least

    def completions(self, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body of `/v1/completions`."""
        fields = parse_fields(CompletionBody, body)
        self._check_model(fields.model)
        before = _check_prefix(fields, origin.prefix)
        prompts = _prompts(fields.prompt)
        if len(prompts) > self._settings.max_prompts:
            message = f"prompt must be at most {self._settings.max_prompts} prompts, got {len(prompts)}"
            raise ApiError(400, message, "prompt")
        more = {} if not fields.echo else {"prompt_logprobs": fields.logprobs}
        special = fields.add_special_tokens is not False and before is None
        tokens = [self._encode(prompt, special, fields.parse_special) for prompt in prompts]
        if before is not None:
            if before.tokens is None or fields.echo:
                wrong = "echo must be false" if fields.echo else "cache_id must be a cache of a prompt, not of messages"
                raise ApiError(400, f"{wrong}: the cache's tokens come before the prompt", "cache_id")
            tokens = [np.concatenate([before.tokens, ids]) for ids in tokens]
        wanted = 1 if fields.max_tokens == 0 else fields.max_tokens  # the engine makes at least one
        samplings = [
            fields.sampling(self._max_tokens(wanted, 16, len(ids)), fields.logprobs, (), **more) for ids in tokens
        ]
        texts = []
        if fields.echo:
            texts = [each if isinstance(each, str) else self.tokenizer.decode(each) for each in prompts]
        return self._prepare(fields, {"prompt": ""}, tokens, samplings, origin, texts)

    def chat(self, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body of `/v1/chat/completions`."""
        return self._chat(parse_fields(ChatBody, body), origin)

    def responses(self, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body of `/v1/responses`, which is answered as a chat."""
        history = origin.history or History((), None, {})
        source = parse_fields(ResponsesBody, body).resolve(history)
        session = history.session or (response_id(str(origin.request_id)) if source.is_stored else None)
        try:
            chat = validated(ChatBody, source.to_chat(history, session))
            call = self._chat(chat, origin)
        except (ApiError, TypeError, ValueError) as error:
            raise in_names_of_responses(error) from None
        return call._replace(source=source if source.is_stored else source.model_copy(update={"input": ""}))

    def _chat(self, fields: ChatBody, origin: Origin) -> ParsedCall:
        self._check_model(fields.model)
        before = _check_prefix(fields, origin.prefix)
        if before is not None:
            if before.messages is None:
                raise ApiError(400, "cache_id must be a cache of messages, for a chat, not of a prompt", "cache_id")
            fields = fields.model_copy(update={"messages": [*before.messages, *fields.messages]})
        tokens = self._chat_tokens(fields)
        wanted = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        max_tokens = self._max_tokens(wanted, self._settings.default_max_tokens, len(tokens))
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        try:
            sampling = fields.sampling(max_tokens, logprobs, self.chat_format.stop)
        except (TypeError, ValueError) as error:  # the client gave these fields under their names in chats
            newer = {"max_tokens": "max_completion_tokens"} if fields.max_completion_tokens is not None else {}
            name, rest = str(error).split(" ", 1)
            raise type(error)(f"{(newer | {'logprobs': 'top_logprobs'}).get(name, name)} {rest}") from None
        return self._prepare(fields, {"messages": []}, [tokens], [sampling], origin, [])

    def embeddings(self, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body of `/v1/embeddings`."""
        fields = parse_fields(EmbeddingBody, body)
        self._check_model(fields.model)
        fields.check_dimensions(self._input_processor.hidden_size)
        inputs = _prompts(fields.input)
        if len(inputs) > self._settings.max_prompts:
            raise ApiError(400, f"input must be at most {self._settings.max_prompts}, got {len(inputs)}", "input")
        tokens = []
        for each in inputs:
            ids = self._encode(each, fields.add_special_tokens is not False, fields.parse_special, "input")
            if not each or not len(ids):  # a tokenizer may begin a text with a token of its own
                raise ApiError(400, "input must have tokens, got none", "input")
            if len(ids) >= self.max_length:  # the engine draws a token after them
                raise self._too_long("input", f"{len(ids):,}, and one is drawn")
            if max(ids) >= self.vocab_size:
                raise ApiError(400, f"input must have tokens below {self.vocab_size}, got {max(ids)}", "input")
            tokens.append(ids)
        return self._prepare(fields, {"input": ""}, tokens, [fields.pooling_params()] * len(tokens), origin, [])

    def cache(self, body: bytes, origin: Origin) -> Document:
        """Parse a body of `/v1/caches`."""
        fields = parse_fields(CacheBody, body)
        self._check_model(fields.model)
        if fields.messages is not None:
            tokens = self._chat_tokens(ChatFields(messages=fields.messages, add_generation_prompt=False))
        else:
            assert fields.prompt is not None
            tokens = self._encode(fields.prompt, fields.add_special_tokens is not False, fields.parse_special)
        prompt: Any = tokens
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(prompt, sampling, origin.request_id, tenant=origin.tenant, priority=-1)
        prepared = self._input_processor.prepare(request)
        return Document(tokens if fields.messages is None else None, fields.messages, prepared, fields.ttl)

    def tokenize(self, body: bytes, origin: Origin) -> tuple[list[int], list[str] | None]:
        """Parse a body of `/tokenize`: return the tokens, and the text of each, if that is asked for."""
        fields = parse_fields(TokenizeBody, body)
        if fields.messages is not None:
            chat = ChatFields(messages=fields.messages, add_generation_prompt=fields.add_generation_prompt)
            tokens = self._chat_tokens(chat).tolist()
        else:
            special = fields.add_special_tokens is not False
            tokens = self._encode(fields.prompt or "", special, fields.parse_special).tolist()
        names = TokenBytes(self.tokenizer)
        return tokens, [token_text(names.of(token)) for token in tokens] if fields.return_token_strs else None

    def detokenize(self, body: bytes, origin: Origin) -> str:
        """Parse a body of `/detokenize`: return the text."""
        tokens = parse_fields(DetokenizeBody, body).tokens
        if len(tokens) > self.max_length:
            raise self._too_long("tokens", f"{len(tokens):,}")
        if tokens and max(tokens) >= self.vocab_size:
            raise ApiError(400, f"tokens must be below {self.vocab_size}, got {max(tokens)}", "tokens")
        return self.tokenizer.decode(tokens)

    def _check_model(self, name: str | None) -> None:
        if name and name not in self.names:
            raise no_such_model(name)

    def _encode(
        self, prompt: str | Sequence[int], special: bool, parses_special: bool | None, name: str = "prompt"
    ) -> np.ndarray:
        """Return the tokens of a prompt, int32 `[T]`; raise ApiError if it is longer than the longest sequence."""
        if not isinstance(prompt, str):
            if len(prompt) > self.max_length:
                raise self._too_long(name, f"{len(prompt):,}")
            return np.array(prompt, np.int32)
        encode = self.tokenizer.encode if parses_special else self.chat_format.encoder.encode
        self._check_size(name, len(prompt) if prompt.isascii() else len(utf8_bytes(prompt)))
        self._check_head(name, prompt)
        return np.array(encode(prompt, special), np.int32)

    def _chat_tokens(self, fields: ChatFields) -> np.ndarray:
        """Return the tokens of a chat, int32 `[T]`; raise ApiError if it is far longer than the longest sequence."""
        self._check_size("messages", sum(len(message.text) for message in fields.messages))
        return self.chat_format.tokens(fields, lambda text: self._check_head("messages", text))

    def _check_head(self, name: str, text: str) -> None:
        """Raise ApiError if the beginning of a text is too long already: tokenising takes a second a MiB."""
        head = text[: _TYPICAL * self.max_length]
        # The cut may split a word into more tokens than it has.
        most = self.max_length + self.max_length // 8
        if len(text) > len(head) and len(self.tokenizer.encode(head, add_special_tokens=False)) > most:
            raise self._too_long(name, "more")

    def _check_size(self, name: str, size: int) -> None:
        """Raise ApiError if a text of `size` bytes has more tokens than the longest sequence, whatever they are."""
        if self._longest_token is not None and size > self._longest_token * self.max_length:
            raise self._too_long(name, f"{-(-size // self._longest_token):,} or more")

    def _too_long(self, name: str, count: str) -> ApiError:
        message = f"{name} must have at most {self.max_length:,} tokens, those of the longest sequence, and has {count}"
        return ApiError(400, message, name, "context_length_exceeded")

    def _max_tokens(self, wanted: int | None, default: int, num_prompt: int) -> int:
        """Return what is asked for; by default as much as there is room for, which the engine checks."""
        return max(1, min(default, self.max_length - num_prompt)) if wanted is None else wanted

    def _prepare(
        self,
        fields: GenerationBody,
        no_prompts: dict[str, Any],
        tokens: list[np.ndarray],
        samplings: list[SamplingParams],
        origin: Origin,
        texts: list[str],
    ) -> ParsedCall:
        self._input_processor.check_choices(fields.num_choices)  # greedy ones are one for the engine
        copies = fields.num_choices if fields.is_greedy else 1
        requests = []
        for number, (ids, sampling) in enumerate(zip(tokens, samplings, strict=True)):
            request = self._request(fields, ids, sampling, origin, None if len(tokens) == 1 else number)
            prepared = self._input_processor.prepare(request)
            # The tokens are there once, and travel once.
            prompt: Any = prepared.tokens
            requests.append(prepared._replace(request=dataclasses.replace(request, prompt=prompt)))
        return ParsedCall(fields.model_copy(update=no_prompts), requests, texts, copies)

    def _request(
        self, fields: GenerationBody, ids: np.ndarray, sampling: SamplingParams, origin: Origin, number: int | None
    ) -> Request:
        ttft, tpot = _target(origin.ttft, fields.ttft_ms), _target(origin.tpot, fields.tpot_ms)
        request_id = origin.request_id
        if request_id is not None and number is not None:
            request_id = f"{request_id}-{number}"
        return Request(
            cast(Sequence[int], ids),  # an array is a sequence in all but name
            sampling,
            request_id,
            session_id=fields.prompt_cache_key if self._has_sessions and number is None else None,
            tenant=origin.tenant,
            cache_salt=fields.cache_salt or "",
            ttft_deadline=ttft,
            tpot_target=None if tpot is None else max(tpot, self._min_tpot),
            priority=min(max(fields.priority or 0, 0), self._settings.max_priority),
        )


def parse_fields(model: type[_Model], body: bytes) -> _Model:
    """Return the fields of a body; raise ApiError if it is no JSON, or not of these fields and types."""
    return validated(model, body)


def validated(model: type[_Model], fields: bytes | dict[str, Any]) -> _Model:
    """Return the fields of JSON, or of a dict; raise ApiError if they are not of the model's names and types."""
    try:
        return model.model_validate(fields) if isinstance(fields, dict) else model.model_validate_json(fields)
    except ValidationError as error:
        raise not_valid(error) from None


def parse_body(parser: RequestParser, kind: Kind, body: bytes, origin: Origin) -> Any:
    """Parse a body by the method of the parser; raise ApiError if it can't be served."""
    try:
        return getattr(parser, kind)(body, origin)
    except (TypeError, ValueError) as error:
        raise not_servable(error) from None


def cache_named(body: bytes) -> str | None:
    """Return the cache that a body names; None: none, or the body is not valid, as its parser will report."""
    if b"cache_id" not in body and b"\\u" not in body:
        return None
    try:
        return msgspec.json.decode(body, type=_Named).cache_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


class _Named(msgspec.Struct):
    cache_id: str | None = None


def _check_prefix(fields: GenerationBody, prefix: Prefix | None) -> Prefix | None:
    """Return the prefix of the prompt; raise ApiError if it is not that of the cache that a body names."""
    if fields.cache_id is None:
        return None
    if prefix is None or prefix.cache_id != fields.cache_id:
        raise ApiError(404, f"there is no cache {fields.cache_id[:80]!r}", "cache_id", "cache_not_found")
    if fields.cache_salt:
        raise ApiError(400, "cache_salt contradicts cache_id: a cache's pages have no salt", "cache_salt")
    return prefix


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [cast(str | list[int], prompt)]
    return cast(list[str | list[int]], prompt)


def _target(header: float | None, milliseconds: float | None) -> float | None:
    """Return a target in seconds; a header, which a gateway may have set, comes before the body."""
    return header if header is not None else None if milliseconds is None else milliseconds / 1000


def token_text(token: bytes) -> str:
    """Return the text of a token; OpenAI writes one that is none as `bytes:` and its bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
