"""Bodies of chats: messages, and what the chat template renders."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from longctx.serving.server.schemas import Body, GenerationBody, TokenIds, refuse

Role = Literal["system", "developer", "user", "assistant"]

_NO_TOOLS = "tools are not there: models of this server answer in text"
_TEXT_ALONE = "only text goes in and out"


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


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]


class ChatFields(Body):
    """Fields that the chat template renders; `chat_template_kwargs` are variables of it."""

    messages: Messages
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[Any, refuse(_NO_TOOLS)] = None
    functions: Annotated[Any, refuse(_NO_TOOLS)] = None
    chat_template: Annotated[Any, refuse("chat_template must not come from clients")] = None
    continue_final_message: Annotated[Any, refuse("continue_final_message is not there")] = None


class ChatBody(GenerationBody, ChatFields):
    """`max_completion_tokens` is the newer name of `max_tokens`."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
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


class _PromptOrMessages(Body):
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


class TokenizeBody(_PromptOrMessages):
    """Either `prompt`, or `messages` of a chat."""

    prompt: str | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class CacheBody(_PromptOrMessages):
    """A document, which is the beginning of prompts: `prompt` (a text or token ids), or `messages` of a chat.

    `ttl`: seconds for which its pages are kept.
    """

    prompt: Annotated[str | TokenIds, Field(union_mode="left_to_right")] | None = None
    ttl: float = Field(3600.0, gt=0, le=1e9)
