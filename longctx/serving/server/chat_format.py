"""`ChatFormat`: the prompts of chats."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from longctx.models.chat_template import PLAIN_STOP, ChatTemplate, has_template
from longctx.models.plain_text import PlainTextEncoder
from longctx.models.tokenizer import HFTokenizer, Tokenizer
from longctx.serving.server.answer_parts import END_OF_THOUGHT, THINK, AnswerFormat
from longctx.serving.server.chat_schemas import ChatFields, Function, Message, ToolCall
from longctx.serving.server.tool_calls import (
    FORMATS,
    NO_ARGUMENTS,
    ToolFormat,
    describe_tools,
    find_format,
    written_call,
)

# What requests are refused by name for, or a template gets from its tokenizer.
_RESERVED = frozenset({"messages", "add_generation_prompt", "special_tokens", "tools", "functions", "chat_template"})
_RESERVED_END = "_token"  # of the names of special tokens
_PATHS = ("_file", "name_or_path", "auto_map")  # ends of names in a tokenizer's configuration that have paths


class ChatPrompt(NamedTuple):
    """Prompt of a chat: tokens int32 `[T]`, and whether it has begun a thought (`<think>`)."""

    tokens: np.ndarray
    is_thinking: bool


@dataclass(frozen=True)
class ChatFormat:
    """Rendering of chats: by a template, or without one as plain questions and answers. It travels to processes.

    Attributes:
      parser: name of the form of tool calls, see `find_format`.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    parser: str = "auto"

    @property
    def has_template(self) -> bool:
        return self._text is not None or has_template(self.tokenizer)

    @property
    def stop(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return () if self.has_template else PLAIN_STOP

    @property
    def _text(self) -> str | None:
        """Text of the template; None: there is none, or it is not known."""
        own = self.template or (self.tokenizer.chat_template if isinstance(self.tokenizer, HFTokenizer) else None)
        return None if own is None else own.text

    @functools.cached_property
    def knows_tools(self) -> bool:
        """Whether the template renders tools."""
        return re.search(r"\btools\b", self._text or "") is not None

    def knows(self, variable: str) -> bool:
        """Return whether the template has a variable."""
        return variable in (self._text or "")

    @functools.cached_property
    def encoder(self) -> PlainTextEncoder:
        """Encoder of clients' texts, and of chats."""
        return PlainTextEncoder(self.tokenizer)

    def tool_format(self, is_forced: bool = False) -> ToolFormat:
        """Return the form of tool calls; a grammar can't make those of Python."""
        found = find_format(self.parser, self._text)
        return FORMATS["hermes"] if is_forced and found.family == "pythonic" else found

    def special_token(self, text: str) -> int | None:
        """Return the special token of this name; None: it is plain text."""
        if not isinstance(self.tokenizer, HFTokenizer):
            return None
        return next((id for id, name in self.tokenizer.control_names.items() if name == text), None)

    def tokenizer_info(self, max_length: int) -> dict[str, Any]:
        """Return the tokenizer's configuration in vLLM's form, without paths.

        Args:
          max_length: of a sequence of the server.
        """
        tokenizer = self.tokenizer
        special = getattr(tokenizer, "special_tokens", {})
        config = tokenizer.config if isinstance(tokenizer, HFTokenizer) else {}
        shown = {name: _contents(value) for name, value in config.items() if not name.endswith(_PATHS)}
        shown.pop("chat_template", None)
        shown |= {"bos_token": None, "eos_token": None, **special} | (
            {"chat_template": self._text} if self._text else {}
        )
        shown |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)}
        shown |= {"vocab_size": tokenizer.vocab_size, "model_max_length": max_length}
        return {"tokenizer_class": "PreTrainedTokenizerFast"} | shown

    def answer_format(self, fields: ChatFields, is_thinking: bool) -> AnswerFormat | None:
        """Return what the answer to a chat may have besides text; None: nothing."""
        thinks = is_thinking or self.knows(THINK) or self.knows(END_OF_THOUGHT)
        if not fields.offered:
            return AnswerFormat(thinks=thinks, is_thinking=is_thinking) if thinks else None
        names = frozenset(tool.name for tool in fields.offered)
        return AnswerFormat(self.tool_format(bool(fields.forced)), names, thinks, is_thinking)

    def prompt(self, fields: ChatFields, check: Callable[[str], object]) -> ChatPrompt:
        """Return the prompt of a chat; its special tokens are those of the template, and of no message or tool.

        `check` is called with its text before that is tokenised.
        """
        variables = dict(fields.chat_template_kwargs or {})
        reserved = sorted(x for x in variables if x in _RESERVED or x.endswith(_RESERVED_END))
        if reserved:
            raise ValueError(f"chat_template_kwargs must not have {', '.join(reserved)[:200]}")
        continues = bool(fields.continue_final_message)
        asks, given = fields.add_generation_prompt is not False and not continues, fields.messages
        if not self.knows_tools:
            given = _without_tools(given, fields.offered)
        elif fields.offered:
            variables["tools"] = [
                {"type": "function", "function": {"parameters": NO_ARGUMENTS} | tool.model_dump(exclude_none=True)}
                for tool in fields.offered
            ]
        if not self.has_template:
            text = _render_plainly(given, asks)
            check(text)
            return ChatPrompt(self.encoder.encode(text), False)
        is_thinking = False

        def render(messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
            nonlocal is_thinking
            if self.template is None:
                text = self.tokenizer.apply_chat_template(messages, asks, **variables)
            else:
                special = self.tokenizer.special_tokens if isinstance(self.tokenizer, HFTokenizer) else {}
                text = self.template.render(messages, asks, special, **variables)
            if continues:
                last = messages[-1]["content"].rstrip()
                at = text.rfind(last)
                if at < 0:
                    raise ValueError("continue_final_message: the chat template changes the last message")
                text = text[: at + len(last)]
            is_thinking = text.rstrip().endswith(THINK)
            check(text)
            return text

        messages = [_to_template(message) for message in given]
        tokens = self.encoder.encode_chat(render, messages, variables)
        return ChatPrompt(tokens, is_thinking)


def _contents(value: Any) -> Any:
    """Return a value of a tokenizer's configuration with tokens as texts."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {name: _contents(each) for name, each in value.items()}
    return [_contents(each) for each in value] if isinstance(value, list) else value


def _to_template(message: Message) -> dict[str, Any]:
    # Templates know the older name of this role.
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _object(call)}}
            for call in message.tool_calls
        ]
    return fields


def _object(call: ToolCall) -> Any:
    """Return a call's arguments as templates get them, an object; a text where it is none."""
    try:
        value = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
    return value if isinstance(value, dict) else call.function.arguments


def _without_tools(messages: Sequence[Message], tools: Sequence[Function]) -> list[Message]:
    """Write tools, calls and their results into the texts of messages, for a template that knows none of them."""
    made = []
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.text}\n</tool_response>"
            made.append(Message(role="user", content=text))
        elif message.tool_calls:
            calls = (written_call(call.function.name, call.function.arguments) for call in message.tool_calls)
            made.append(Message(role="assistant", content="\n".join(filter(None, (message.text, *calls)))))
        else:
            made.append(message)
    if tools:
        text = describe_tools(tools)
        if made[0].role in ("system", "developer"):
            made[0] = made[0].model_copy(update={"content": f"{made[0].text}\n\n{text}"})
        else:
            made.insert(0, Message(role="system", content=text))
    return made


def _render_plainly(messages: Sequence[Message], asks: bool) -> str:
    """Render a chat as `longctx chat` does: the system's text, such as a document, then questions and answers."""
    text = ""
    for message in messages:
        if message.role in ("system", "developer"):
            text += ("\n" if text else "") + message.text
        else:
            text += f"\nQ: {message.text}" if message.role == "user" else f"\nA: {message.text}"
    return f"{text}\nA: " if asks else text
