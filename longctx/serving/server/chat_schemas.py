"""Bodies of chats: messages, tools, and what the chat template renders."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from longctx.serving.server.errors import ApiError
from longctx.serving.server.schemas import Body, CacheControl, GenerationBody, OpenBody, TokenIds, must_be

Role = Literal["system", "developer", "user", "assistant", "tool"]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
MAX_TOOLS = 512


class TextPart(Body):
    type: Annotated[str, must_be(("text",), "parts of a message must be of type text, got {}")]
    text: str = ""
    cache_control: CacheControl | None = None


class CalledFunction(Body):
    """A call of a tool in a history; `arguments` are JSON, as a text."""

    name: ToolName
    arguments: str = "{}"


class ToolCall(Body):
    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Role
    content: str | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None
    function_call: Any = None
    audio: Any = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.function_call:
            raise ValueError("function_call is not there: give tool_calls, its newer name")
        if self.audio:
            raise ValueError("audio is not there: only text goes in and out")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls must be of the role assistant, got {self.role}")
        return self

    @property
    def retention(self) -> float:
        """Seconds for which pages up to its end are kept; 0: as long as there is room."""
        parts = self.content if isinstance(self.content, list) else ()
        return max((each.cache_control.seconds for each in (self, *parts) if each.cache_control), default=0.0)

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @property
    def size(self) -> int:
        """Characters of all its texts."""
        calls = sum(len(call.function.arguments) + len(call.function.name) for call in self.tool_calls or ())
        return len(self.text) + calls + len(self.reasoning_content or "")


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]


class Function(Body):
    """A tool; `parameters`: JSON schema of its arguments, an object; none: it takes none."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Annotated[str, must_be(("function",), "tools must be of type function, got {}")]
    function: Function
    cache_control: CacheControl | None = None


class _ToolName(Body):
    name: ToolName


class NamedTool(Body):
    type: Literal["function"]
    function: _ToolName


class _ChatOptions(OpenBody):
    """Fields that the chat template renders beside messages; `chat_template_kwargs` are variables of it."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ApiError(400, "tools must have different names", "tools")
        choice = self.tool_choice
        if choice == "required" and not names:
            raise ApiError(400, "tool_choice required needs tools", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ApiError(400, f"tool_choice must be one of tools, got {choice.function.name!r}", "tool_choice")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("add_generation_prompt contradicts continue_final_message")
        return self

    @property
    def offered(self) -> list[Function]:
        """Tools that the answer may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def forced(self) -> list[Function]:
        """Tools of which the answer has to call one; none: it need not."""
        if isinstance(self.tool_choice, NamedTool):
            return [each for each in self.offered if each.name == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []


class ChatFields(_ChatOptions):
    """Fields that the chat template renders."""

    messages: Messages

    @model_validator(mode="after")
    def _can_go_on(self) -> Self:
        if self.continue_final_message and not self.messages[-1].text:
            raise ValueError("continue_final_message needs a text in the last message")
        return self

    @property
    def marks(self) -> dict[int, float]:
        """Seconds for which pages are kept, by the number of the message at whose end they end; -1: of the tools."""
        tools = [tool.cache_control.seconds for tool in self.tools or () if tool.cache_control is not None]
        marks = {-1: max(tools)} if tools else {}
        return marks | {number: each.retention for number, each in enumerate(self.messages) if each.retention}

    @property
    def size(self) -> int:
        """Characters of all texts, about."""
        tools = len(json.dumps([tool.model_dump() for tool in self.tools])) if self.tools else 0
        return tools + sum(message.size for message in self.messages)


class ChatBody(GenerationBody, ChatFields):
    """Fields of `/v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None

    @field_validator("modalities")
    @classmethod
    def _modalities(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and value != ["text"]:
            raise ValueError('modalities must be ["text"]')
        return value

    @model_validator(mode="after")
    def _agree(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs must come with logprobs: true")
        if self.forced and self._asked():
            raise ValueError(f"{self._asked()[0][0]} contradicts tool_choice: the answer is a call of a tool")
        return self


class _PromptOrMessages(_ChatOptions):
    model: str | None = None
    prompt: Any = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be there, and not both")
        return self

    def to_chat(self) -> dict[str, Any]:
        """Return the fields of the chat whose messages these are."""
        return {name: getattr(self, name) for name in ChatFields.model_fields}


class TokenizeBody(_PromptOrMessages):
    """Either `prompt`, or `messages` of a chat."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class CacheBody(_PromptOrMessages):
    """A document, which is the beginning of prompts: `prompt` (a text or token ids), or `messages` of a chat.

    `ttl`: seconds for which its pages are kept.
    """

    add_generation_prompt: bool | None = False
    prompt: Annotated[str | TokenIds, Field(union_mode="left_to_right")] | None = None
    ttl: float = Field(3600.0, gt=0, le=1e9)
