"""Bodies of OpenAI's `/v1/responses`, and the chats that they are."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from longctx.serving.server.chat_schemas import MAX_TOOLS, CalledFunction, ChatBody, Message, ToolCall, ToolName
from longctx.serving.server.errors import ApiError
from longctx.serving.server.schemas import Body

MAX_ITEMS = 4096
CallId = Annotated[str, Field(max_length=256)]


class ContentPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> "ContentPart":
        if self.type not in ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"):
            raise ValueError(f"parts must be of type input_text or output_text, got {self.type[:40]!r}")
        if self.text is None and self.refusal is None:
            raise ValueError(f"a part of type {self.type} must have text")
        return self


Parts = str | Annotated[list[ContentPart], Field(max_length=1024, fail_fast=True)]


class Item(Body):
    """Item of an input: `message`, `function_call`, `function_call_output` or `reasoning`."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: CallId | None = None
    name: ToolName | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: list[ContentPart] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Item":
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        if self.type not in needed:
            raise ValueError(
                f"type must be message, function_call, function_call_output or reasoning, got {self.type[:40]!r}"
            )
        for name in needed[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} must have {name}")
        return self


class FunctionTool(Body):
    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _is_function(self) -> "FunctionTool":
        if self.type != "function":
            raise ValueError(f"tools must be of type function, got {self.type[:40]!r}: no tool runs on this server")
        if self.name is None:
            raise ValueError("a tool must have a name")
        return self


class ToolChoice(Body):
    type: str
    name: ToolName | None = None


class TextFormat(Body):
    type: str
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(validation_alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """`effort` is a variable of the chat template; a `summary` of a thought is the thought."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(Body):
    """OpenAI's `/v1/responses`. `store` (true by default) keeps the response, for `previous_response_id`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    include: list[str] | None = None

    _unknown: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _names(self) -> "ResponsesBody":
        extra = self.__pydantic_extra__ or {}
        for name, why in _REFUSED.items():
            if extra.get(name):
                raise ApiError(400, f"{name} is not there: {why}", name)
        for each in self.include or ():
            if each != "reasoning.encrypted_content":
                raise ApiError(400, f"include can't have {each[:80]!r}: it is not there", "include")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.type != "function":
            message = f"tool_choice must be none, auto, required or a function, got {self.tool_choice.type[:40]!r}"
            raise ApiError(400, message, "tool_choice")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise ApiError(400, "text.verbosity is not there: say in the input how long answers should be", "text")
        self._unknown = tuple(sorted(set(extra) - set(_REFUSED) - _HARMLESS))
        self.__pydantic_extra__ = {}
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields that are not known."""
        return self._unknown

    @property
    def messages(self) -> list[Message]:
        """Messages of the input."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        return to_messages(self.input)

    def chat(self, history: Sequence[Message], session: str | None) -> ChatBody:
        """Return the chat that this is.

        Args:
          history: messages before the input.
          session: of the chain of responses.
        """
        before = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        messages = [*before, *history, *self.messages]
        chosen: Any = self.tool_choice
        if isinstance(chosen, ToolChoice):
            chosen = {"type": "function", "function": {"name": chosen.name}}
        form: dict[str, Any] | None = None
        wanted = None if self.text is None else self.text.format
        if wanted is not None:
            form = {"type": wanted.type}
            if wanted.type == "json_schema":
                form |= {"json_schema": {"name": wanted.name, "schema": wanted.schema_}}
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [message.model_dump(exclude_none=True) for message in messages],
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": None,
            "tool_choice": chosen,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": form,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "user": self.user,
            "prompt_cache_key": self.prompt_cache_key or session,
        }
        if self.tools:
            functions = ({"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools)
            fields["tools"] = list(functions)
        return ChatBody.model_validate(fields)

    def echo(self) -> dict[str, Any]:
        """Return the fields of the response that repeat those of the request."""
        text = (
            {"format": {"type": "text"}} if self.text is None else _without_none(self.text.model_dump(by_alias=False))
        )
        if text.get("format", {}).get("schema_") is not None:
            text["format"]["schema"] = text["format"].pop("schema_")
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, ToolChoice) else self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "store": self.store is not False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": text,
            "tool_choice": choice or "auto",
            "tools": [{"strict": True} | _without_none(tool.model_dump()) for tool in self.tools or ()],
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


_REFUSED = {
    "background": "the answer comes with the request",
    "conversation": "name the response before it: previous_response_id",
    "prompt": "there are no prompt templates: give input",
    "top_logprobs": "/v1/chat/completions has log probabilities",
    "context_management": "send the items that shall count",
}
_HARMLESS = frozenset({
    "service_tier", "safety_identifier", "max_tool_calls", "stream_options", "prompt_cache_retention",
    "client_metadata", "prompt_cache_options", "moderation",
})  # fmt: skip


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }


def _joined(parts: str | list[ContentPart] | None) -> str:
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "\n".join(part.text or part.refusal or "" for part in parts)


def to_messages(items: Sequence[Item]) -> list[Message]:
    """Return the messages of items: calls and thoughts are of the message of the assistant that they are beside."""
    made: list[Message] = []
    thought: str | None = None
    for item in items:
        if item.type == "reasoning":
            thought = _joined(item.content) or _joined(item.summary) or None
        elif item.type == "function_call_output":
            made.append(Message(role="tool", tool_call_id=item.call_id, content=_joined(item.output)))
        elif item.type == "function_call":
            function = CalledFunction(name=item.name or "", arguments=item.arguments or "{}")
            call = ToolCall(id=item.call_id or "", function=function)
            last = made[-1] if made else None
            if last is not None and last.role == "assistant" and thought is None:
                made[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]})
            else:
                made.append(Message(role="assistant", tool_calls=[call], reasoning_content=thought))
            thought = None
        else:
            role = item.role or "user"
            reasoning = thought if role == "assistant" else None
            made.append(Message(role=role, content=_joined(item.content), reasoning_content=reasoning))
            thought = None
    return made
