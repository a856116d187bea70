"""Writer of responses: one answer or its chunks, of a call's outputs and events, in the forms of OpenAI's two APIs.

`msgspec` writes the JSON, since a stream has a chunk for each token. A token that is part of a character has bytes in
log probabilities, and no text.
"""

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from fastapi.sse import format_sse_event
from msgspec import UNSET, Raw, Struct, UnsetType, json

from longctx.models.tokenizer import TokenBytes
from longctx.serving.request.output import Event, FinishReason, Logprobs, Output, TokenLogprob
from longctx.serving.server.answer_parts import AnswerReader, Part, joined_parts
from longctx.serving.server.calls import ParsedCall
from longctx.serving.server.chat_schemas import ChatBody
from longctx.serving.server.errors import ApiError
from longctx.serving.server.request_parser import token_text
from longctx.serving.server.schemas import CompletionBody

_LEAST = -9999.0  # JSON has no minus infinity
_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
    "moved": "abort",
}

encode = json.Encoder().encode


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(Struct):
    """Lists of `/v1/completions` with an entry for each token. The first token of all has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: "list[ChatLogprob] | UnsetType" = UNSET


class ChatLogprobs(Struct):
    content: list[ChatLogprob]


class FunctionCall(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Struct):
    """Call of a tool, or what a chunk adds to one, which has its `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET


class Message(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct):
    """Choice with its `text` (completions), its `message` (chats), or what a chunk adds to that (`delta`)."""

    index: int
    text: str | UnsetType = UNSET
    message: Message | UnsetType = UNSET
    delta: Message | UnsetType = UNSET
    logprobs: CompletionLogprobs | ChatLogprobs | Raw | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(Struct):
    """Whole answer, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


def chat_logprobs(token_bytes: TokenBytes, tokens: Iterable[int], logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return the log probabilities of tokens, in order."""
    content = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        own = token_bytes.of(token)
        top = []
        for other, value in logprob.top:
            its = token_bytes.of(other)
            top.append(ChatLogprob(token_text(its), max(value, _LEAST), list(its)))
        content.append(ChatLogprob(token_text(own), max(logprob.logprob, _LEAST), list(own), top))
    return ChatLogprobs(content)


_MARK = "\0the text\0"  # JSON writes it as no other field has it
_WRITTEN = 256  # tokens that are Python's objects at a time, which take ten times the memory of their JSON


def whole_chat_logprobs(token_bytes: TokenBytes, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Raw:
    """Return the log probabilities of a whole answer, as JSON."""
    parts = [
        encode(chat_logprobs(token_bytes, tokens[at : at + _WRITTEN], logprobs[at : at + _WRITTEN]).content)[1:-1]
        for at in range(0, len(tokens), _WRITTEN)
    ]
    return Raw(b"".join([b'{"content":[', *_separated(parts), b"]}"]))


def _separated(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of a JSON list with commas between them."""
    for number, part in enumerate(parts):
        yield from (b",", part) if number else (part,)


class LogprobLists:
    """Writes the lists of `/v1/completions`, piece by piece; `text_offset` counts characters of the choice's text."""

    def __init__(self, token_bytes: TokenBytes, offset: int = 0) -> None:
        self._bytes, self._offset = token_bytes, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprob | None]) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], [])
        for token, logprob in zip(tokens, logprobs, strict=True):
            own = self._bytes.of(token)
            name = token_text(own)
            lists.tokens.append(name)
            lists.text_offset.append(max(self._offset, 0))
            self._offset += len(self._decoder.decode(own))
            if logprob is None:
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
                continue
            lists.token_logprobs.append(max(logprob.logprob, _LEAST))
            top = {token_text(self._bytes.of(other)): max(value, _LEAST) for other, value in logprob.top}
            lists.top_logprobs.append({name: max(logprob.logprob, _LEAST)} | top if top else {})
        return lists

    def write_whole(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], num_without: int = 0) -> Raw:
        """Return the lists of a whole answer, as JSON; its first tokens have no log probabilities."""
        names = CompletionLogprobs.__struct_fields__
        parts: list[list[bytes]] = [[] for _ in names]
        for at in range(0, len(tokens), _WRITTEN):
            end = at + _WRITTEN
            known = logprobs[max(at - num_without, 0) : max(end - num_without, 0)]
            unknown = [None] * min(max(num_without - at, 0), len(tokens) - at, _WRITTEN)
            lists = self.write(tokens[at:end], [*unknown, *known])
            for part, name in zip(parts, names, strict=True):
                part.append(encode(getattr(lists, name))[1:-1])
        pieces: list[bytes] = []
        for name, part in zip(names, parts, strict=True):
            pieces += [b',"' if pieces else b'{"', name.encode(), b'":[', *_separated(part), b"]"]
        return Raw(b"".join([*pieces, b"}"]))


class ResponseWriter(ABC):
    """Writer of what a call's client gets, as a whole or as pieces of a stream, in the form of one API.

    Attributes:
      done: bytes at the end of a stream.
      created: seconds since 1970.
      transfer_params: `kv_transfer_params` of the whole answer.
    """

    prefix: str
    done = b""

    def __init__(self, call: ParsedCall, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        self._call, self._bytes = call, token_bytes
        self.id, self._model, self.created = f"{self.prefix}{call_id}", model, int(time.time())
        self._num_prompt = sum(len(request.tokens) for request in call.requests)
        self._num_cached = [0] * len(call.requests)
        self._num_output = 0
        self.transfer_params: dict[str, Any] | None = None

    @abstractmethod
    def whole(self, outputs: Mapping[tuple[int, int], Output]) -> Any:
        """Return the answer of all outputs, by the number of the request and their index."""

    @abstractmethod
    def begin(self) -> Iterator[Any]:
        """Yield the pieces before any token."""

    @abstractmethod
    def pieces(self, number: int, events: Sequence[Event]) -> Iterator[Any]:
        """Yield the pieces of the events of a request."""

    @abstractmethod
    def end(self) -> Iterator[Any]:
        """Yield the pieces after all events."""

    def failed(self, error: ApiError) -> Iterator[Any]:
        """Yield the pieces that end a stream with an error."""
        yield error.body

    def event(self, piece: Any) -> bytes:
        """Return the server-sent event of a piece."""
        name = piece.get("type") if isinstance(piece, dict) else None
        return format_sse_event(data_str=encode(piece).decode(), event=name)

    def stream(self, number: int, events: Sequence[Event]) -> bytes:
        """Return the server-sent events of the events of a request."""
        return b"".join(map(self.event, self.pieces(number, events)))

    def _count(self, number: int, tokens: Sequence[int], output: Output | None) -> None:
        self._num_output += len(tokens) * self._call.copies
        if output is not None:
            self._num_cached[number] = max(self._num_cached[number], output.metrics.cached_tokens)


class ChoiceWriter(ResponseWriter):
    """Writer of choices, which are numbered over all prompts; each copy of a choice is written."""

    object: str
    chunk_object: str
    done = b"data: [DONE]\n\n"

    def __init__(self, call: ParsedCall, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(call, call_id, model, token_bytes)
        options = call.body.stream_options
        self._reports_at_end = bool(options and options.include_usage)
        self._reports_always = bool(options and options.continuous_usage_stats)
        self._gives_tokens = bool(call.body.return_token_ids)
        # Whether pieces differ in their text alone until the end, and what stands around it, by choice.
        self._is_plain = not (self._reports_always or self._gives_tokens)
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, outputs: Mapping[tuple[int, int], Output]) -> Answer:
        choices: list[Choice] = []
        for (number, index), output in sorted(outputs.items()):
            self._count(number, self._kept(output.token_ids), output)
            choices += [self._choice(choice, number, output) for choice in self._choices(number, index)]
        answer = Answer(self.id, self.object, self.created, self._model, choices, self._usage(is_end=True))
        if self.transfer_params is not None:
            answer.kv_transfer_params = self.transfer_params
        return answer

    def begin(self) -> Iterator[Answer]:
        for number in range(len(self._call.requests)):
            for choice in range(number * self._call.num_choices, (number + 1) * self._call.num_choices):
                first = self._first(choice, number)
                if first is not None:
                    yield self._chunk(first)

    def pieces(self, number: int, events: Sequence[Event]) -> Iterator[Answer]:
        for event in events:
            tokens = self._kept(event.token_ids)
            self._count(number, tokens, event.output)
            if event.text or event.output is not None or event.logprobs or (self._gives_tokens and tokens):
                for choice in self._choices(number, event.index):
                    yield from map(self._chunk, self._pieces(choice, number, event))

    def stream(self, number: int, events: Sequence[Event]) -> bytes:
        if not self._is_plain or any(event.output is not None for event in events):
            return super().stream(number, events)
        written: list[bytes] = []
        for event in events:
            self._count(number, event.token_ids, None)
            if event.text:
                for choice in self._choices(number, event.index):
                    before, after = self._frames.get(choice) or self._frame(choice, number, event)
                    written += before, encode(event.text), after
        return b"".join(written)

    def _frame(self, choice: int, number: int, event: Event) -> tuple[bytes, bytes]:
        """Return what stands before and after a text in the events of a choice."""
        sample = self.event(self._chunk(self._piece(choice, number, replace(event, text=_MARK))))
        before, _, after = sample.partition(encode(_MARK))
        self._frames[choice] = before, after
        return before, after

    def end(self) -> Iterator[Answer]:
        """Yield the chunk after all others, which has no choices, if the client asked for the usage."""
        if self._reports_at_end:
            yield Answer(self.id, self.chunk_object, self.created, self._model, [], self._usage(is_end=True))

    @abstractmethod
    def _choice(self, choice: int, number: int, output: Output) -> Choice:
        """Return a whole choice."""

    @abstractmethod
    def _first(self, choice: int, number: int) -> Choice | None:
        """Return the beginning of a choice before there is any token."""

    def _pieces(self, choice: int, number: int, event: Event) -> Iterable[Choice]:
        """Return what an event adds to a choice."""
        return (self._piece(choice, number, event),)

    @abstractmethod
    def _piece(self, choice: int, number: int, event: Event) -> Choice:
        """Return what an event adds to a choice that is text alone."""

    def _kept(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens that count: all of them."""
        return tokens

    def _choices(self, number: int, index: int) -> range:
        """Return the numbers of the choices that a completion makes."""
        first = number * self._call.num_choices + index
        return range(first, first + self._call.copies)

    def _usage(self, is_end: bool) -> Usage:
        details = PromptTokensDetails(sum(self._num_cached)) if is_end else None
        return Usage(self._num_prompt, self._num_output, self._num_prompt + self._num_output, details)

    def _chunk(self, choice: Choice) -> Answer:
        usage: Usage | UnsetType | None = None if self._reports_at_end else UNSET
        if self._reports_always:
            usage = self._usage(is_end=False)
        return Answer(self.id, self.chunk_object, self.created, self._model, [choice], usage)


class ChatWriter(ChoiceWriter):
    """Writer of `/v1/chat/completions`."""

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, call: ParsedCall, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(call, call_id, model, token_bytes)
        self._has_logprobs = bool(cast(ChatBody, call.body).logprobs)
        self._is_plain &= call.answer is None and not self._has_logprobs
        self._readers: dict[int, AnswerReader] = {}

    def _choice(self, choice: int, number: int, output: Output) -> Choice:
        logprobs = None
        if self._has_logprobs:
            logprobs = whole_chat_logprobs(self._bytes, output.token_ids, output.logprobs or ())
        tokens = output.token_ids if self._gives_tokens else UNSET
        message, reason = Message("assistant", output.text, None), _REASONS[output.finish_reason]
        if self._call.answer is not None:
            reader = self._call.new_reader()
            message = whole_message([*reader.push(output.text), *reader.finish()])
            reason = self._reason(reader, output)
        return Choice(choice, message=message, logprobs=logprobs, finish_reason=reason, token_ids=tokens)

    def _first(self, choice: int, number: int) -> Choice:
        return Choice(choice, delta=Message("assistant", ""))

    def _pieces(self, choice: int, number: int, event: Event) -> Iterable[Choice]:
        if self._call.answer is None:
            return super()._pieces(choice, number, event)
        reader = self._readers.get(choice)
        if reader is None:
            reader = self._readers[choice] = self._call.new_reader()
        parts = reader.push(event.text)
        if event.output is not None:
            parts += reader.finish()
        pieces = [Choice(choice, delta=_delta(part)) for part in parts]
        if event.output is not None or not pieces:
            pieces.append(Choice(choice, delta=Message()))
        if event.output is not None:
            pieces[-1].finish_reason = self._reason(reader, event.output)
        pieces[0].logprobs = self._logprobs(event.token_ids, event.logprobs)
        if self._gives_tokens:
            pieces[0].token_ids = list(event.token_ids)
        has_news = parts or event.output is not None or self._gives_tokens or self._has_logprobs
        return pieces if has_news else ()

    def _reason(self, reader: AnswerReader, output: Output) -> str:
        """Return why a choice ends that may have calls of tools."""
        return "tool_calls" if reader.calls_tools and output.finish_reason == "stop" else _REASONS[output.finish_reason]

    def _piece(self, choice: int, number: int, event: Event) -> Choice:
        logprobs = self._logprobs(event.token_ids, event.logprobs)
        reason = None if event.output is None else _REASONS[event.output.finish_reason]
        tokens = list(event.token_ids) if self._gives_tokens else UNSET
        delta = Message(content=event.text) if event.text or event.output is None else Message()
        return Choice(choice, delta=delta, logprobs=logprobs, finish_reason=reason, token_ids=tokens)

    def _logprobs(self, tokens: Sequence[int], logprobs: Iterable[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._bytes, tokens, logprobs) if self._has_logprobs else None


def _delta(part: Part) -> Message:
    """Return what a part adds to a message."""
    if part.kind == "reasoning":
        return Message(reasoning_content=part.text)
    if part.kind == "text":
        return Message(content=part.text)
    if part.name is None:
        return Message(tool_calls=[ToolCall(part.number, function=FunctionCall(arguments=part.text))])
    function = FunctionCall(part.name, part.text)
    return Message(tool_calls=[ToolCall(part.number, part.call_id or "", "function", function)])


def whole_message(parts: Iterable[Part]) -> Message:
    """Return the message of an answer's parts; where it calls tools and has no text, its content is null."""
    joined = joined_parts(parts)
    calls = [
        ToolCall(id=part.call_id or "", type="function", function=FunctionCall(part.name or "", part.text))
        for part in joined
        if part.kind == "tool_call"
    ]
    text = "".join(part.text for part in joined if part.kind == "text")
    reasoning = "".join(part.text for part in joined if part.kind == "reasoning")
    message = Message("assistant", text if text or not calls else None, None)
    message.reasoning_content, message.tool_calls = reasoning or UNSET, calls or UNSET
    return message


class CompletionWriter(ChoiceWriter):
    """Writer of `/v1/completions`."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, call: ParsedCall, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(call, call_id, model, token_bytes)
        body = cast(CompletionBody, call.body)
        self._echoes, self._has_logprobs, self._keeps = bool(body.echo), body.logprobs is not None, body.max_tokens != 0
        self._is_plain &= self._keeps and not self._has_logprobs
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        self._lists: dict[int, LogprobLists] = {}
        self._begun: set[int] = set()  # choices that have told the tokens of their prompts

    def whole(self, outputs: Mapping[tuple[int, int], Output]) -> Answer:
        for (number, index), output in outputs.items():
            if index == 0 and output.prompt_logprobs is not None:
                self._prompt_logprobs[number] = output.prompt_logprobs
        return super().whole(outputs)

    def _choice(self, choice: int, number: int, output: Output) -> Choice:
        tokens = self._kept(output.token_ids)
        text = output.text if self._keeps else ""
        if self._echoes:
            text = self._call.texts[number] + text
        given = list(tokens) if self._gives_tokens else UNSET
        prompt = self._call.requests[number].tokens.tolist() if self._gives_tokens else UNSET
        reason = _REASONS[output.finish_reason] if self._keeps else "length"
        logprobs = self._whole_logprobs(number, output)
        return Choice(choice, text, logprobs=logprobs, finish_reason=reason, token_ids=given, prompt_token_ids=prompt)

    def _whole_logprobs(self, number: int, output: Output) -> Raw | None:
        if not self._has_logprobs:
            return None
        tokens, logprobs = self._kept(output.token_ids), self._kept(output.logprobs or [])
        if not self._echoes:
            return LogprobLists(self._bytes).write_whole(tokens, logprobs)
        prompt = self._call.requests[number].tokens.tolist()
        # The text leaves out what its tokens begin with, such as <bos>.
        left_out = len(b"".join(map(self._bytes.of, prompt)).decode(errors="replace")) - len(self._call.texts[number])
        known = Logprobs(self._prompt_logprobs[number])
        known.extend(logprobs)
        return LogprobLists(self._bytes, -left_out).write_whole([*prompt, *tokens], known, 1)

    def _first(self, choice: int, number: int) -> Choice | None:
        return Choice(choice, self._call.texts[number]) if self._echoes else None

    def _piece(self, choice: int, number: int, event: Event) -> Choice:
        output = event.output
        text, tokens = (event.text, event.token_ids) if self._keeps else ("", ())
        reason = None if output is None else _REASONS[output.finish_reason] if self._keeps else "length"
        logprobs = None
        if self._has_logprobs:
            lists = self._lists.setdefault(choice, LogprobLists(self._bytes))
            logprobs = lists.write(tokens, event.logprobs)
        piece = Choice(choice, text, logprobs=logprobs, finish_reason=reason)
        if self._gives_tokens:
            piece.token_ids = list(tokens)
            if choice not in self._begun:
                self._begun.add(choice)
                piece.prompt_token_ids = self._call.requests[number].tokens.tolist()
        return piece

    def _kept(self, tokens: Sequence) -> Sequence:
        """Return no tokens, if the client asked for none: the engine makes at least one."""
        return tokens if self._keeps else tokens[:0]
