"""Bodies of `/v1/responses`: items of a conversation and options, which become the fields of a chat completion.

Fields that the Responses API does not have, such as `seed` or `top_k`, are those of a chat completion.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import ConfigDict, Field, TypeAdapter, field_validator, model_validator

from longctx.serving.server.errors import ApiError
from longctx.serving.server.schemas import Body, must_be, refuse

LOGPROBS = "message.output_text.logprobs"
REFERENCE = "item_reference"
_ITEMS = ("message", "function_call", "function_call_output", "reasoning", REFERENCE)
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_STATELESS = "send the conversation as input, or previous_response_id"
_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512

_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9.-]")

# Fields of chats that have another name here, or no meaning.
_OTHER_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f"include with {LOGPROBS}",
    "functions": "tools",
    "function_call": "tool_choice",
}
_NOT_HERE = (
    *("n", "add_generation_prompt", "continue_final_message", "modalities", "audio", "web_search_options"),
    *("return_token_ids", "kv_transfer_params"),
)
_PARAMS = {name: other.partition(" ")[0] for name, other in _OTHER_NAMES.items()}


class ItemPart(Body):
    """Part of an item's content; `text` or `refusal` has what it says."""

    type: Annotated[str, must_be(_TEXTS, "parts of type {} are not there: only text goes in and out")]
    text: str = ""
    refusal: str = ""


Parts = Annotated[list[ItemPart], Field(max_length=1024, fail_fast=True)]


class Item(Body):
    """Item of a conversation: a message, a function's call or output, or the reasoning before an answer.

    A reference stands for an item of a response that is kept, by its `id`.
    """

    type: str = "message"
    id: str | None = Field(None, max_length=256)
    status: str | None = Field(None, max_length=40)
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256)
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: Annotated[
        Any, refuse("encrypted_content is not there: reasoning items have their text in content")
    ] = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "Item":
        if self.type not in _ITEMS:
            raise ValueError(f"items of type {self.type[:40]!r} are not there: only {', '.join(_ITEMS)}")
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments")}
        needed |= {"function_call_output": ("call_id", "output"), REFERENCE: ("id",)}
        missing = [name for name in needed.get(self.type, ()) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of type {self.type} must have {', '.join(missing)}")
        return self

    def shown(self, name: str) -> dict[str, Any]:
        """Return the item as clients see it, with an id, which is `name` unless it has one."""
        item = self.model_dump(exclude_none=True)
        if isinstance(self.content, str):
            kind = "output_text" if self.role == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": self.content}]
        of_item = [item[field] for field in ("content", "output", "summary") if isinstance(item.get(field), list)]
        for part in (part for parts in of_item for part in parts):
            part.pop("text" if part["type"] == "refusal" else "refusal", None)
            if part["type"] == "output_text":
                part["annotations"] = []
        return {"id": name, "status": "completed"} | item


_items, _item = TypeAdapter(list[Item]), TypeAdapter(Item)


def read_items(stored: bytes) -> list[Item]:
    """Return items that have been stored as JSON."""
    return _items.validate_json(stored)


class History(NamedTuple):
    """Stored items that a body names.

    Attributes:
      turns: items of the conversation before the input, each turn a JSON list.
      session: of that conversation; None: there is none.
      referenced: items that the input refers to, as JSON, by id.
    """

    turns: tuple[bytes, ...]
    session: str | None
    referenced: Mapping[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.turns)) + sum(map(len, self.referenced.values()))


class TextFormat(Body):
    """Format of the text: `text`, `json_object`, or `json_schema` with a `name` and a `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("a format of type json_schema must have name and schema")
        return self


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    """`effort` is a variable of the chat template, `reasoning_effort`; `none` sets `enable_thinking` to false too."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesStreamOptions(Body):
    include_obfuscation: Annotated[Any, refuse("deltas are not obfuscated")] = None


class FunctionTool(Body):
    """Function that the model may call. Its `parameters` are a JSON schema."""

    type: Annotated[str, must_be(("function",), "tools of type {} are not there: only functions, which clients run")]
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class ResponsesBody(Body):
    """Fields of `POST /v1/responses`.

    `store` (true unless it is given) keeps the response in the server's memory, where `previous_response_id` finds it.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096, fail_fast=True)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=1024)
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = Field(None, max_length=1024)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: int | None = Field(None, ge=1)

    background: Annotated[Any, refuse("responses are not computed in the background")] = None
    conversation: Annotated[Any, refuse(f"there are no conversations: {_STATELESS}")] = None
    prompt: Annotated[Any, refuse("there are no stored prompts: send instructions and input")] = None
    context_management: Annotated[Any, refuse(f"conversations are not compacted: {_STATELESS}")] = None
    moderation: Annotated[Any, refuse("there is no moderation")] = None
    prompt_cache_options: Annotated[Any, refuse("prompts are cached without options: see prompt_cache_key")] = None

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        pairs = value or {}
        if len(pairs) > _MAX_PAIRS or any(len(k) > _MAX_NAME or len(v) > _MAX_VALUE for k, v in pairs.items()):
            raise ValueError(
                f"metadata must be at most {_MAX_PAIRS} pairs, of names up to {_MAX_NAME} and values up to "
                f"{_MAX_VALUE} characters"
            )
        return value

    @model_validator(mode="after")
    def _agree(self) -> "ResponsesBody":
        for name, value in (self.model_extra or {}).items():
            if name in _OTHER_NAMES and value is not None:
                raise ValueError(f"{name} must not be there: in /v1/responses it is {_OTHER_NAMES[name]}")
            if name in _NOT_HERE and value not in (None, False) and (name, value) != ("n", 1):
                raise ValueError(f"{name} must not be there: it is for /v1/chat/completions")
        if self.top_logprobs and not self.has_logprobs:
            raise ValueError(f'top_logprobs must come with include: ["{LOGPROBS}"]')
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must come with stream: true")
        return self

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept."""
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[Item]:
        """Items of the input, of which a text is one."""
        if isinstance(self.input, str):
            return _items.validate_python([{"role": "user", "content": self.input}])
        return self.input

    def resolve(self, history: History) -> "ResponsesBody":
        """Return the body with items in place of references to them."""
        if isinstance(self.input, str) or all(item.type != REFERENCE for item in self.input):
            return self
        items = [
            _item.validate_json(history.referenced[str(item.id)]) if item.type == REFERENCE else item
            for item in self.input
        ]
        return self.model_copy(update={"input": items})

    def to_chat(self, history: History, session: str | None) -> dict[str, Any]:
        """Return the fields of the chat completion that answers this.

        Args:
          history: the conversation before the input.
          session: whose pages the chat continues, unless `prompt_cache_key` names one.
        """
        before = [item for turn in history.turns for item in read_items(turn)]
        messages = chat_messages([*before, *self.items])
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        chat: dict[str, Any] = {
            name: value for name, value in (self.model_extra or {}).items() if name not in (*_OTHER_NAMES, *_NOT_HERE)
        }
        chat |= {
            "messages": messages,
            "model": self.model,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "user": self.user,
            "prompt_cache_retention": self.prompt_cache_retention,
            "prompt_cache_key": self.prompt_cache_key or session,
        }
        if self.has_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.tools:
            chat["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
                for tool in self.tools
            ]
            chat["parallel_tool_calls"] = self.parallel_tool_calls
        if isinstance(self.tool_choice, NamedTool):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice
        wanted = None if self.text is None else self.text.format
        if wanted is not None and wanted.type != "text":
            chat["response_format"] = {"type": wanted.type}
        if wanted is not None and wanted.type == "json_schema":
            schema = wanted.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
            chat["response_format"]["json_schema"] = schema
        effort = None if self.reasoning is None else self.reasoning.effort
        if effort is not None:
            variables = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
            chat["chat_template_kwargs"] = variables | (chat.get("chat_template_kwargs") or {})
        return chat


def response_id(call_id: str) -> str:
    """Return the id of a call's response, which a URL can have, whatever id its client sent."""
    return f"resp_{_NOT_IN_IDS.sub('-', call_id)}"


def text_of(content: str | Sequence[ItemPart] | None) -> str:
    """Return the text of an item's content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal for part in content)


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Reasoning, the text after it and the calls after that are one message."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the last message, which later items may add to
    for item in items:
        is_call = item.type == "function_call"
        if not is_call and not (item.type == "reasoning" or item.role == "assistant"):
            answer = None
            if item.type == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            else:
                messages.append({"role": item.role, "content": text_of(item.content)})
            continue
        is_full = answer is not None and (
            "tool_calls" in answer or answer["content"] is not None or item.type == "reasoning"
        )
        if answer is None or (is_full and not is_call):
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        if is_call:
            function = {"name": item.name, "arguments": item.arguments}
            calls = answer.setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif item.type == "reasoning":
            answer["reasoning_content"] = text_of(item.content) or text_of(item.summary)
        else:
            answer["content"] = text_of(item.content)
    return messages


def in_names_of_responses(error: Exception) -> Exception:
    """Return an error about a chat's field with the name that the field has in `/v1/responses`."""
    if isinstance(error, ApiError):
        if error.param not in _PARAMS:
            return error
        name = _PARAMS[error.param]
        message = error.message.replace(error.param, name, 1)
        renamed = ApiError(error.status, message, name, error.code)
        renamed.headers = error.headers
        return renamed
    name, _, rest = str(error).partition(" ")
    return type(error)(f"{_PARAMS[name]} {rest}") if name in _PARAMS else error


class _Reference(msgspec.Struct):
    type: str | None = None
    id: str | None = None


class _Named(msgspec.Struct):
    previous_response_id: str | None = None
    input: str | list[_Reference] = ""


def stored_names(body: bytes) -> tuple[str | None, list[str]]:
    """Return the response that a body continues, and the items that it refers to.

    There are none in a body that is not valid, as its parser will report.
    """
    try:
        named = msgspec.json.decode(body, type=_Named)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None, []
    items = [] if isinstance(named.input, str) else named.input
    return named.previous_response_id, [item.id for item in items if item.type == REFERENCE and item.id is not None]


def describe(body: ResponsesBody, answered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response that repeat its request, with defaults of OpenAI, and what is `answered`."""
    wanted = None if body.text is None or body.text.format is None else body.text.format
    text = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    choice: Any = body.tool_choice or "auto"
    tools = [{"parameters": None, "strict": None} | tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    reasoning = body.reasoning or ReasoningOptions()
    return {
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.is_stored,
        "text": {"format": text, "verbosity": "medium"},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice,
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        **answered,
    }
