"""What the outputs and events of a call become: one answer, or its chunks, in the forms of OpenAI's two APIs."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec import UNSET, UnsetType

from longctx.models.tokenizer import TokenBytes
from longctx.serving.request.output import Event, FinishReason, Output, TokenLogprob
from longctx.serving.server.logprobs import LogprobLists, chat_logprobs
from longctx.serving.server.read_call import Call
from longctx.serving.server.schemas.chat import ChatBody
from longctx.serving.server.schemas.completions import CompletionBody
from longctx.serving.server.schemas.responses import (
    Answer,
    ChatChoice,
    Choice,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    DeltaChoice,
    Message,
    PromptTokensDetails,
    Usage,
)

_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
    "moved": "abort",
}


class Answers(ABC):
    """Writes what a call's client gets. Choices are numbered over all prompts; copies of a choice are written each.

    Attributes:
      transfer_params: `kv_transfer_params` of the whole answer.
    """

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, call: Call, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        self._call, self._bytes = call, token_bytes
        self.id, self._model, self._created = f"{self.prefix}-{call_id}", model, int(time.time())
        options = call.body.stream_options
        self._reports_at_end = bool(options and options.include_usage)
        self._reports_always = bool(options and options.continuous_usage_stats)
        self._num_prompt = sum(len(request.tokens) for request in call.requests)
        self._num_cached = [0] * len(call.requests)
        self._num_output = 0
        self._gives_tokens = bool(call.body.return_token_ids)
        self.transfer_params: dict[str, Any] | None = None

    def whole(self, outputs: Mapping[tuple[int, int], Output]) -> Answer:
        """The answer of all outputs, by the number of the request and their index."""
        choices: list[Choice] = []
        for (number, index), output in sorted(outputs.items()):
            self._count(number, self._kept(output.token_ids), output)
            choices += [self._choice(choice, number, output) for choice in self._choices(number, index)]
        answer = Answer(self.id, self.object, self._created, self._model, choices, self._usage(is_end=True))
        if self.transfer_params is not None:
            answer.kv_transfer_params = self.transfer_params
        return answer

    def begin(self) -> Iterator[Answer]:
        """The chunks before any token."""
        for number in range(len(self._call.requests)):
            for choice in range(number * self._call.num_choices, (number + 1) * self._call.num_choices):
                first = self._first(choice, number)
                if first is not None:
                    yield self._chunk(first)

    def pieces(self, number: int, events: Sequence[Event]) -> Iterator[Answer]:
        """The chunks of the events of a request."""
        for event in events:
            tokens = self._kept(event.token_ids)
            self._count(number, tokens, event.output)
            if event.text or event.output is not None or event.logprobs or (self._gives_tokens and tokens):
                for choice in self._choices(number, event.index):
                    piece = self._piece(choice, number, event)
                    if piece is not None:
                        yield self._chunk(piece)

    def end(self) -> Iterator[Answer]:
        """The chunk after all others, which has no choices, if the client wants to know the usage."""
        if self._reports_at_end:
            yield Answer(self.id, self.chunk_object, self._created, self._model, [], self._usage(is_end=True))

    @abstractmethod
    def _choice(self, choice: int, number: int, output: Output) -> Choice:
        """A whole choice."""

    @abstractmethod
    def _first(self, choice: int, number: int) -> Choice | None:
        """What a choice begins with before there is any token."""

    @abstractmethod
    def _piece(self, choice: int, number: int, event: Event) -> Choice | None:
        """What an event adds to a choice."""

    def _kept(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens that count: all of them."""
        return tokens

    def _choices(self, number: int, index: int) -> range:
        """The numbers of the choices that a completion makes."""
        first = number * self._call.num_choices + index
        return range(first, first + self._call.copies)

    def _count(self, number: int, tokens: Sequence[int], output: Output | None) -> None:
        self._num_output += len(tokens) * self._call.copies
        if output is not None:
            self._num_cached[number] = max(self._num_cached[number], output.metrics.cached_tokens)

    def _usage(self, is_end: bool) -> Usage:
        details = PromptTokensDetails(sum(self._num_cached)) if is_end else None
        return Usage(self._num_prompt, self._num_output, self._num_prompt + self._num_output, details)

    def _chunk(self, choice: Choice) -> Answer:
        usage: Usage | UnsetType | None = None if self._reports_at_end else UNSET
        if self._reports_always:
            usage = self._usage(is_end=False)
        return Answer(self.id, self.chunk_object, self._created, self._model, [choice], usage)


class ChatAnswers(Answers):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, call: Call, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(call, call_id, model, token_bytes)
        self._has_logprobs = bool(cast(ChatBody, call.body).logprobs)

    def _choice(self, choice: int, number: int, output: Output) -> ChatChoice:
        logprobs = None
        if self._has_logprobs:
            logprobs = chat_logprobs(self._bytes, output.token_ids, output.logprobs or ())
        tokens = output.token_ids if self._gives_tokens else UNSET
        message = Message("assistant", output.text)
        return ChatChoice(choice, message, logprobs, _REASONS[output.finish_reason], tokens)

    def _first(self, choice: int, number: int) -> DeltaChoice:
        return DeltaChoice(choice, Delta("assistant", ""))

    def _piece(self, choice: int, number: int, event: Event) -> DeltaChoice:
        logprobs = chat_logprobs(self._bytes, event.token_ids, event.logprobs) if self._has_logprobs else None
        reason = None if event.output is None else _REASONS[event.output.finish_reason]
        tokens = list(event.token_ids) if self._gives_tokens else UNSET
        delta = Delta(content=event.text) if event.text or event.output is None else Delta()
        return DeltaChoice(choice, delta, logprobs, reason, tokens)


class CompletionAnswers(Answers):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, call: Call, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(call, call_id, model, token_bytes)
        body = cast(CompletionBody, call.body)
        self._echoes, self._has_logprobs, self._keeps = bool(body.echo), body.logprobs is not None, body.max_tokens != 0
        # The log probabilities of a prompt are known with the last event of its first completion.
        self._is_late = self._echoes and self._has_logprobs
        self._prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self._late: list[tuple[int, int, Output]] = []
        self._lists: dict[int, LogprobLists] = {}

    def whole(self, outputs: Mapping[tuple[int, int], Output]) -> Answer:
        for (number, index), output in outputs.items():
            self._note_prompt(number, index, output)
        return super().whole(outputs)

    def _choice(self, choice: int, number: int, output: Output) -> CompletionChoice:
        tokens = self._kept(output.token_ids)
        text = output.text if self._keeps else ""
        if self._echoes:
            text = self._call.texts[number] + text
        given = list(tokens) if self._gives_tokens else UNSET
        prompt = self._call.requests[number].tokens.tolist() if self._gives_tokens else UNSET
        reason = _REASONS[output.finish_reason] if self._keeps else "length"
        return CompletionChoice(choice, text, self._whole_logprobs(number, output), reason, given, prompt)

    def _whole_logprobs(self, number: int, output: Output) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        tokens, logprobs = list(self._kept(output.token_ids)), list(self._kept(output.logprobs or []))
        if not self._echoes:
            return LogprobLists(self._bytes).write(tokens, logprobs)
        prompt = self._call.requests[number].tokens.tolist()
        of_prompt: list[TokenLogprob | None] = [None, *self._prompt_logprobs[number]]
        return LogprobLists(self._bytes).write([*prompt, *tokens], [*of_prompt, *logprobs])

    def _first(self, choice: int, number: int) -> CompletionChoice | None:
        if not self._echoes or self._is_late:
            return None
        return CompletionChoice(choice, self._call.texts[number])

    def _piece(self, choice: int, number: int, event: Event) -> CompletionChoice | None:
        output = event.output
        if self._is_late:
            if output is not None:
                self._note_prompt(number, event.index, output)
                self._late.append((choice, number, output))
            return None
        text, tokens = (event.text, event.token_ids) if self._keeps else ("", ())
        reason = None if output is None else _REASONS[output.finish_reason] if self._keeps else "length"
        logprobs = None
        if self._has_logprobs:
            lists = self._lists.setdefault(choice, LogprobLists(self._bytes))
            logprobs = lists.write(tokens, event.logprobs)
        given = list(tokens) if self._gives_tokens else UNSET
        return CompletionChoice(choice, text, logprobs, reason, given)

    def end(self) -> Iterator[Answer]:
        for choice, number, output in sorted(self._late, key=lambda late: late[0]):
            yield self._chunk(self._choice(choice, number, output))
        yield from super().end()

    def _kept(self, tokens: Sequence) -> Sequence:
        """None, if the engine made one because it makes at least one."""
        return tokens if self._keeps else tokens[:0]

    def _note_prompt(self, number: int, index: int, output: Output) -> None:
        if index == 0 and output.prompt_logprobs is not None:
            self._prompt_logprobs[number] = output.prompt_logprobs


def make_answers(call: Call, call_id: str, model: str, token_bytes: TokenBytes) -> Answers:
    """The writer of a call's API."""
    kind = ChatAnswers if isinstance(call.body, ChatBody) else CompletionAnswers
    return kind(call, call_id, model, token_bytes)
