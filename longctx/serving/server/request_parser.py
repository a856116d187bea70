"""Parser of requests: makes the engine's requests of the bodies that clients send."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from longctx.models.plain_text import encode_array
from longctx.models.text_pieces import of_owner
from longctx.models.tokenizer import TokenBytes, Tokenizer, utf8_bytes
from longctx.serving.config import EngineConfig
from longctx.serving.engine.input_processor import InputProcessor
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.server.calls import Document, Kind, Origin, ParsedCall, Prefix
from longctx.serving.server.chat_format import ChatFormat, ChatPrompt
from longctx.serving.server.chat_schemas import CacheBody, ChatBody, ChatFields, TokenizeBody
from longctx.serving.server.embeddings import EmbeddingBody
from longctx.serving.server.errors import ApiError, no_such_model, not_servable, not_valid
from longctx.serving.server.messages_schemas import CountBody, MessagesBody
from longctx.serving.server.responses_body import History, ResponsesBody, in_names_of_responses, response_id
from longctx.serving.server.schemas import CompletionBody, DetokenizeBody, GenerationBody
from longctx.serving.server.settings import ServerSettings
from longctx.serving.server.structured import NamedGrammar
from longctx.serving.server.tool_calls import PYTHON_TAG, forced_grammar, offered_grammar

_Model = TypeVar("_Model", bound=BaseModel)
_Fields = TypeVar("_Fields", bound=msgspec.Struct)

_NO_TARGET = 1e9  # seconds
_MOST_MARKS = 4  # each but the last takes the tokens of a prompt again
_TYPICAL = 8  # characters of a token that few texts have in the mean


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
        self._defaults = sampling_defaults(chat_format.tokenizer)
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
        more: dict[str, Any] = {} if not fields.echo else {"prompt_logprobs": fields.logprobs}
        special = fields.add_special_tokens is not False and before is None
        tokens = [self._encode(prompt, special, fields.parse_special, fields) for prompt in prompts]
        if before is not None:
            if before.tokens is None or fields.echo:
                wrong = "echo must be false" if fields.echo else "cache_id must be a cache of a prompt, not of messages"
                raise ApiError(400, f"{wrong}: the cache's tokens come before the prompt", "cache_id")
            tokens = [np.concatenate([before.tokens, ids]) for ids in tokens]
        wanted = 1 if fields.max_tokens == 0 else fields.max_tokens  # the engine makes at least one
        named = fields.named_grammar()
        more |= {"defaults": self._defaults, "grammar": None if named is None else named.grammar}
        samplings = [
            fields.sampling(self._max_tokens(wanted, 16, len(ids)), fields.logprobs, (), **more) for ids in tokens
        ]
        texts = []
        if fields.echo:
            texts = [each if isinstance(each, str) else self.tokenizer.decode(each) for each in prompts]
        kept = [((len(ids), fields.retention),) if fields.retention else () for ids in tokens]
        return self._prepare(fields, {"prompt": ""}, tokens, samplings, origin, texts, named, kept)

    def chat(self, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body of `/v1/chat/completions`."""
        return self._chat(parse_fields(ChatBody, body), origin)

    def messages(self, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body of Anthropic's `/v1/messages`, which is answered as a chat."""
        source = parse_fields(MessagesBody, body)
        call = self._chat(parse_fields(ChatBody, source.to_chat()), origin)
        return call._replace(source=source.model_copy(update={"messages": []}), ignored=source.ignored)

    def count_tokens(self, body: bytes, origin: Origin) -> tuple[int, tuple[str, ...]]:
        """Parse a body of `/v1/messages/count_tokens`: return the tokens of the prompt, and names of unknown fields."""
        source = parse_fields(CountBody, body)
        chat = parse_fields(ChatBody, source.to_chat())
        self._check_model(chat.model)
        return len(self._chat_prompt(chat).tokens), source.ignored

    def responses(self, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body of `/v1/responses`, which is answered as a chat."""
        history = origin.history or History((), None, {})
        source = parse_fields(ResponsesBody, body).resolve(history)
        session = history.session or (response_id(str(origin.request_id)) if source.is_stored else None)
        try:
            chat = parse_fields(ChatBody, source.to_chat(history, session))
            call = self._chat(chat, origin)
        except (ApiError, TypeError, ValueError) as error:
            raise in_names_of_responses(error) from None
        source = source if source.is_stored else source.model_copy(update={"input": ""})
        return call._replace(source=source)

    def _chat(self, fields: ChatBody, origin: Origin) -> ParsedCall:
        self._check_model(fields.model)
        before = _check_prefix(fields, origin.prefix)
        if before is not None:
            if before.messages is None:
                raise ApiError(400, "cache_id must be a cache of messages, for a chat, not of a prompt", "cache_id")
            fields = fields.model_copy(update={"messages": [*before.messages, *fields.messages]})
        prompt = self._chat_prompt(fields)
        tokens = self._truncated(prompt.tokens, fields)
        named, more = self._chat_grammar(fields)
        max_tokens = self._max_tokens(fields.max_tokens, self._settings.default_max_tokens, len(tokens))
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        try:
            sampling = fields.sampling(max_tokens, logprobs, self.chat_format.stop, self._defaults, **more)
        except (TypeError, ValueError) as error:  # the client gave these fields under their names in chats
            newer = {"max_tokens": "max_completion_tokens"} if fields.max_completion_tokens is not None else {}
            name, rest = str(error).split(" ", 1)
            raise type(error)(f"{(newer | {'logprobs': 'top_logprobs'}).get(name, name)} {rest}") from None
        kept = [self._retained(fields, tokens)]
        call = self._prepare(fields, {"messages": [], "tools": None}, [tokens], [sampling], origin, [], named, kept)
        return call._replace(answer=self.chat_format.answer_format(fields, prompt.is_thinking))

    def _retained(self, fields: ChatBody, tokens: np.ndarray) -> tuple[tuple[int, float], ...]:
        """Return how many first tokens of a chat are kept for how long."""
        marks, last = fields.marks, len(fields.messages) - 1
        is_cut = fields.truncate_prompt_tokens is not None  # its first tokens are not those of the messages
        if fields.retention:
            marks[last] = max(fields.retention, marks.get(last, 0.0))
        if len(marks) > _MOST_MARKS:
            message = f"cache_control must be there {_MOST_MARKS} times at most, got {len(marks)}"
            raise ApiError(400, message, "messages")
        return tuple(
            (len(tokens) if is_cut or number == last else self._count_first(fields, number, tokens), seconds)
            for number, seconds in sorted(marks.items())
        )

    def _count_first(self, fields: ChatBody, number: int, tokens: np.ndarray) -> int:
        """Return how many tokens of a chat do not depend on what follows a message; all if that can't be told."""
        after = fields.messages[number + 1]
        other = "b" if after.text.startswith("a") else "a"
        changed = after.model_copy(update={"content": other, "tool_calls": None, "reasoning_content": None})
        chat = fields.model_copy(update={"messages": [*fields.messages[: number + 1], changed]})
        try:
            others = self._chat_prompt(chat).tokens
        except ValueError:  # of a template that refuses such a chat
            return len(tokens)
        shared = min(len(tokens), len(others))
        differs = np.flatnonzero(tokens[:shared] != others[:shared])
        return max(1, int(differs[0]) if len(differs) else shared)

    def _chat_grammar(self, fields: ChatBody) -> tuple[NamedGrammar | None, dict[str, Any]]:
        """Return the grammar of the answer to a chat, and parameters that go with it."""
        named = fields.named_grammar()
        more: dict[str, Any] = {}
        if fields.offered:
            form = self.chat_format.tool_format(bool(fields.forced))
            marker = self.chat_format.special_token(form.begin or PYTHON_TAG)
            if marker is not None:  # it has to be in the text
                more["skip_special"] = False
            is_parallel = fields.parallel_tool_calls is not False
            if fields.forced:
                is_parallel &= fields.tool_choice == "required"
                named = NamedGrammar("tools", forced_grammar(form, fields.forced, is_parallel, marker))
            elif named is None and (made := offered_grammar(form, fields.offered, is_parallel, marker)) is not None:
                named = NamedGrammar("tools", made)
        return named, more | {"grammar": None if named is None else named.grammar}

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
            ids = self._encode(each, fields.add_special_tokens is not False, fields.parse_special, name="input")
            if not each or not len(ids):  # a tokenizer may begin a text with a token of its own
                raise ApiError(400, "input must have tokens, got none", "input")
            if len(ids) >= self.max_length:  # the engine draws a token after them
                raise self._too_long("input", f"{len(ids):,}, and one is drawn")
            if max(ids) >= self.vocab_size:
                raise ApiError(400, f"input must have tokens below {self.vocab_size}, got {max(ids)}", "input")
            tokens.append(ids)
        return self._prepare(fields, {"input": ""}, tokens, [fields.pooling_params()] * len(tokens), origin, [], None)

    def cache(self, body: bytes, origin: Origin) -> Document:
        """Parse a body of `/v1/caches`."""
        fields = parse_fields(CacheBody, body)
        self._check_model(fields.model)
        if fields.messages is not None:
            tokens = self._chat_prompt(parse_fields(ChatFields, fields.to_chat())).tokens
        else:
            assert fields.prompt is not None
            tokens = self._encode(fields.prompt, fields.add_special_tokens is not False, fields.parse_special)
        prompt: Any = tokens
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        kept = ((len(tokens), fields.ttl),) if len(tokens) else ()
        request = Request(prompt, sampling, origin.request_id, tenant=origin.tenant, priority=-1, retain=kept)
        prepared = self._input_processor.prepare(request)
        own = tokens if fields.messages is None else None
        return Document(own, fields.messages, prepared, fields.ttl, fields.ignored)

    def tokenize(self, body: bytes, origin: Origin) -> tuple[list[int], list[str] | None, tuple[str, ...]]:
        """Parse a body of `/tokenize`: return the tokens, the text of each if asked for, and unknown fields."""
        fields = parse_fields(TokenizeBody, body)
        if fields.messages is not None:
            tokens = self._chat_prompt(parse_fields(ChatFields, fields.to_chat())).tokens.tolist()
        else:
            special = fields.add_special_tokens is not False
            tokens = self._encode(fields.prompt or "", special, fields.parse_special).tolist()
        names = TokenBytes(self.tokenizer)
        texts = [token_text(names.of(token)) for token in tokens] if fields.return_token_strs else None
        return tokens, texts, fields.ignored

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
        self,
        prompt: str | Sequence[int],
        special: bool,
        parses_special: bool | None,
        fields: GenerationBody | None = None,
        name: str = "prompt",
    ) -> np.ndarray:
        """Return the tokens of a prompt, int32 `[T]`; raise ApiError if it is longer than the longest sequence."""
        if fields is not None and fields.truncate_prompt_tokens is not None:
            return self._truncated(self._encode(prompt, special, parses_special), fields)
        if not isinstance(prompt, str):
            if len(prompt) > self.max_length:
                raise self._too_long(name, f"{len(prompt):,}")
            return np.array(prompt, np.int32)
        self._check_size(name, len(prompt) if prompt.isascii() else len(utf8_bytes(prompt)))
        self._check_head(name, prompt)
        if parses_special:
            return encode_array(self.tokenizer, prompt, special)
        return self.chat_format.encoder.encode(prompt, special)

    def _chat_prompt(self, fields: ChatFields) -> ChatPrompt:
        """Return the prompt of a chat; raise ApiError if it is far longer than the longest sequence."""
        self._check_size("messages", fields.size)
        return self.chat_format.prompt(fields, lambda text: self._check_head("messages", text))

    def _truncated(self, tokens: np.ndarray, fields: GenerationBody) -> np.ndarray:
        """Return the last `truncate_prompt_tokens` of a prompt; -1: as many as leave room for the answer."""
        most = fields.truncate_prompt_tokens
        if most is None:
            return tokens
        if most == -1:
            most = max(1, self.max_length - (fields.max_tokens or 1))
        if most == 0:
            raise ApiError(400, "truncate_prompt_tokens must be -1, or at least 1, got 0", "truncate_prompt_tokens")
        return tokens[-most:]

    def _check_head(self, name: str, text: str) -> None:
        """Raise ApiError if the beginning of a text is too long already: tokenising takes a second a MiB."""
        head = text[: _TYPICAL * self.max_length]
        # The cut may split a word into more tokens than it has.
        most = self.max_length + self.max_length // 8
        if len(text) > len(head) and len(encode_array(self.tokenizer, head, False)) > most:
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
        named: NamedGrammar | None,
        kept: Sequence[tuple[tuple[int, float], ...]] = (),
    ) -> ParsedCall:
        self._input_processor.check_choices(fields.num_choices)  # greedy ones are one for the engine
        copies = fields.num_choices if fields.is_greedy else 1
        requests = []
        for number, (ids, sampling) in enumerate(zip(tokens, samplings, strict=True)):
            request = self._request(fields, ids, sampling, origin, None if len(tokens) == 1 else number)
            if kept and kept[number]:
                request = dataclasses.replace(request, retain=kept[number])
            try:
                prepared = self._input_processor.prepare(request)
            except ValueError as error:
                if named is not None and str(error).startswith("grammar "):
                    raise ValueError(f"{named.field}: the {error}") from None
                raise
            # The tokens are there once, and travel once.
            prompt: Any = prepared.tokens
            requests.append(prepared._replace(request=dataclasses.replace(request, prompt=prompt)))
        return ParsedCall(fields.model_copy(update=no_prompts), requests, texts, copies, ignored=fields.ignored)

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
            priority=min(fields.priority or 0, self._settings.max_priority),
        )


def sampling_defaults(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the sampling parameters of a checkpoint (`generation_config.json`), as far as they are valid."""
    found: dict[str, Any] = {}
    for name, value in getattr(tokenizer, "sampling", {}).items():
        with contextlib.suppress(TypeError, ValueError):
            SamplingParams(**{"temperature": 1.0} | {name: value})
            found[name] = value
    return found


def parse_fields(model: type[_Model], body: bytes | dict[str, Any]) -> _Model:
    """Return the fields of a body; raise ApiError if it is no JSON, or not of these fields and types."""
    try:
        return model.model_validate(body) if isinstance(body, dict) else model.model_validate_json(body)
    except ValidationError as error:
        raise not_valid(error) from None


def parse_body(parser: RequestParser, kind: Kind, body: bytes, origin: Origin) -> Any:
    """Parse a body by the method of the parser; raise ApiError if it can't be served."""
    try:
        with of_owner(origin.tenant, _salt_named(body)):
            return getattr(parser, kind)(body, origin)
    except (TypeError, ValueError) as error:
        raise not_servable(error) from None


class _Named(msgspec.Struct):
    cache_id: str | None = None


class _Salted(msgspec.Struct):
    cache_salt: str | None = None


def cache_named(body: bytes) -> str | None:
    """Return the cache that a body names; None: none, or the body is not valid, as its parser will report."""
    named = _named(body, b"cache_id", _Named)
    return None if named is None else named.cache_id


def _salt_named(body: bytes) -> str:
    """Return a digest of the salt that a body has, however long; of a body that can't be read so, one of its own."""
    named = _named(body, b"cache_salt", _Salted)
    salt = body if named is None else (named.cache_salt or "").encode()
    return hashlib.sha256(salt).hexdigest() if salt else ""


def _named(body: bytes, field: bytes, kind: type[_Fields]) -> _Fields | None:
    """Return a field of a body, without the rest of it; None: it can't be read so."""
    if field not in body and b"\\u" not in body:
        return kind()
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


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
