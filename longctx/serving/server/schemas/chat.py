"""The body of `/v1/chat/completions`."""

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from longctx.serving.server.schemas.base import Body, refuse
from longctx.serving.server.schemas.generation import GenerationBody, Role

_NO_TOOLS = "tools are not there: models of this server answer in text"
_TEXT_ALONE = "only text goes in and out"
_MAX_MESSAGES = 4096


class TextPart(Body):
    type: str
    text: str = ""

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value != "text":
            raise ValueError(f"parts of a message must be of type text, got {value[:40]!r}")
        return value


class Message(Body):
    role: Role
    content: str | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[Any, refuse(_NO_TOOLS)] = None
    function_call: Annotated[Any, refuse(_NO_TOOLS)] = None
    audio: Annotated[Any, refuse(_TEXT_ALONE)] = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class ChatFields(Body):
    """What is rendered by the chat template; `chat_template_kwargs` are variables of it."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[Any, refuse(_NO_TOOLS)] = None
    functions: Annotated[Any, refuse(_NO_TOOLS)] = None
    chat_template: Annotated[Any, refuse("chat_template must not come from clients")] = None
    continue_final_message: Annotated[Any, refuse("continue_final_message is not there")] = None


class ChatBody(GenerationBody, ChatFields):
    """`max_completion_tokens` is the newer name of `max_tokens`."""

    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=2**31 - 1)
    tool_choice: Any = None
    modalities: list[str] | None = None
    audio: Annotated[Any, refuse(_TEXT_ALONE)] = None
    web_search_options: Annotated[Any, refuse("there is no web search")] = None

    @field_validator("modalities")
    @classmethod
    def _modalities(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and value != ["text"]:
            raise ValueError('modalities must be ["text"]')
        return value

    @field_validator("tool_choice")
    @classmethod
    def _tool_choice(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError(_NO_TOOLS)
        return value

    @model_validator(mode="after")
    def _agree(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs must come with logprobs: true")
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise ValueError(f"max_completion_tokens and max_tokens contradict each other: {newer} and {older}")
        return self
