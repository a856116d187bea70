"""Bodies of Anthropic's `/v1/messages`, and the chats that they are."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longctx.serving.server.chat_schemas import MAX_TOOLS, CalledFunction, Message, Role, ToolCall, ToolName
from longctx.serving.server.errors import ApiError
from longctx.serving.server.known_fields import Refused
from longctx.serving.server.schemas import Body, CacheControl, OpenBody, StopText


class Block(Body):
    """Block of a message: `text`, `tool_use`, `tool_result` or `thinking`; others are refused by name."""

    type: str
    text: str | None = None
    id: Annotated[str, Field(max_length=256)] | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Block":
        needed = {"text": "text", "tool_use": "name", "tool_result": "tool_use_id", "thinking": "thinking"}
        if self.type == "redacted_thinking":
            return self
        if self.type not in needed:
            raise ValueError(f"type must be text, tool_use, tool_result or thinking, got {self.type[:40]!r}")
        if getattr(self, needed[self.type]) is None:
            raise ValueError(f"a block of type {self.type} must have {needed[self.type]}")
        return self


Blocks = Annotated[list[Block], Field(max_length=4096, fail_fast=True)]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class OfferedTool(Body):
    """A tool of the client; those that run on a server are refused by name."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _is_custom(self) -> "OfferedTool":
        if self.type not in (None, "custom"):
            raise ValueError(f"tools must be of type custom, got {str(self.type)[:40]!r}: no tool runs on this server")
        return self


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """`enabled`, `adaptive` or `disabled`, for chat templates that have `enable_thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class Form(Body):
    type: Literal["json_schema"]
    schema_: Annotated[Any, Field(validation_alias="schema")] = None


class OutputConfig(Body):
    format: Form | None = None
    effort: str | None = None


_REFUSED = {
    "mcp_servers": Refused("no tool runs on this server"),
    "container": Refused("no code runs on this server"),
    "context_management": Refused("send the messages that shall count"),
    "speed": Refused("there is one speed", ("standard",)),
    "inference_geo": Refused("the server is where it is", ("global",)),
}
_HARMLESS = frozenset({
    "metadata", "service_tier", "betas", "diagnostics", "user_profile_id", "workspace_id",
    "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k",
})  # fmt: skip


class CountBody(OpenBody):
    """Fields that count for the tokens of a prompt."""

    refused_fields, harmless_fields = _REFUSED, _HARMLESS

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: Form | None = None

    @model_validator(mode="after")
    def _has_name(self) -> "CountBody":
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise ApiError(400, "tool_choice must have a name with the type tool, and none otherwise", "tool_choice")
        return self

    def to_chat(self) -> dict[str, Any]:
        """Return the fields of the chat that this is."""
        messages = [] if self.system is None else [_message("system", self.system)]
        for turn in self.messages:
            messages += _messages(turn)
        choice, form = self.tool_choice, None
        config = self.output_config or OutputConfig()
        if (asked := config.format or self.output_format) is not None:
            form = {"type": "json_schema", "json_schema": {"name": "output", "schema": asked.schema_}}
        chosen: Any = None
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            chosen = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "tool_choice": chosen,
            "response_format": form,
            "reasoning_effort": config.effort,
            "cache_control": self.cache_control,
        }
        last = messages[-1] if messages else None
        if last is not None and last.role == "assistant" and last.text and not last.tool_calls:
            fields["continue_final_message"] = True  # as Anthropic has it: the answer goes on with it
        if self.tools:
            fields["tools"] = [
                {
                    "type": "function",
                    "cache_control": tool.cache_control,
                    "function": {"name": tool.name, "description": tool.description, "strict": tool.strict}
                    | ({} if tool.input_schema is None else {"parameters": tool.input_schema}),
                }
                for tool in self.tools
            ]
        if choice is not None and choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        return fields


_Stop = Annotated[StopText, Field(min_length=1)]


class MessagesBody(CountBody):
    """Anthropic's `/v1/messages`. A `cache_control` of a block counts for its whole message."""

    max_tokens: int
    stop_sequences: Annotated[list[_Stop], Field(max_length=32, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None

    def to_chat(self) -> dict[str, Any]:
        more: dict[str, Any] = {"max_tokens": self.max_tokens, "stream": self.stream, "stop": self.stop_sequences}
        more |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        if self.stop_sequences:  # the answer says which one ended it
            more["include_stop_str_in_output"] = True
        return super().to_chat() | more


def _text(content: str | list[Block] | None) -> str:
    """Return a text, or texts of blocks, one after another."""
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise ApiError(400, f"a block of type {block.type} can't be there: give text", "messages")
    return "\n".join(block.text or "" for block in content)


def _message(role: Role, content: str | list[Block]) -> Message:
    return Message(role=role, content=_text(content), cache_control=_mark(content))


def _mark(content: str | list[Block] | None) -> CacheControl | None:
    """Return the mark of blocks that keeps pages for longest, which is that of their message."""
    marks = [] if content is None or isinstance(content, str) else [each.cache_control for each in content]
    return max((each for each in marks if each is not None), key=lambda each: each.seconds, default=None)


def _messages(turn: Turn) -> Iterator[Message]:
    """Yield the messages of a turn: results of tools come before what the user says."""
    if isinstance(turn.content, str):
        yield _message(turn.role, turn.content)
        return
    texts: list[Block] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for block in turn.content:
        if block.type == "tool_result":
            if turn.role != "user":
                raise ApiError(400, "a block of type tool_result must be of the role user", "messages")
            text = _text(block.content)
            yield Message(
                role="tool",
                tool_call_id=block.tool_use_id,
                content=f"Error: {text}" if block.is_error else text,
                cache_control=block.cache_control,
            )
        elif block.type == "tool_use":
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append(
                ToolCall(id=block.id or "", function=CalledFunction(name=block.name or "", arguments=arguments))
            )
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "text":
            texts.append(block)
    if calls and turn.role != "assistant":
        raise ApiError(400, "a block of type tool_use must be of the role assistant", "messages")
    if texts or calls or thoughts:
        yield Message(
            role=turn.role,
            content=_text(texts),
            cache_control=_mark([block for block in turn.content if block.type != "tool_result"]),
            tool_calls=calls or None,
            reasoning_content="\n".join(thoughts) or None,
        )
