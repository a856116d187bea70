"""`ChatFormat`: the prompts of chats."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longctx.models.chat_template import PLAIN_STOP, ChatTemplate, has_template
from longctx.models.plain_text import PlainTextEncoder
from longctx.models.tokenizer import HFTokenizer, Tokenizer
from longctx.serving.server.chat_schemas import ChatFields, Message

# What requests are refused by name for, or a template gets from its tokenizer.
_RESERVED = frozenset({"messages", "add_generation_prompt", "special_tokens", "tools", "functions", "chat_template"})
_RESERVED_END = "_token"  # of the names of special tokens


@dataclass(frozen=True)
class ChatFormat:
    """Rendering of chats: by a template, or without one as plain questions and answers. It travels to processes."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None

    @property
    def has_template(self) -> bool:
        return self.template is not None or has_template(self.tokenizer)

    @property
    def stop(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return () if self.has_template else PLAIN_STOP

    @functools.cached_property
    def encoder(self) -> PlainTextEncoder:
        """Encoder of clients' texts, and of chats."""
        return PlainTextEncoder(self.tokenizer)

    def tokens(self, fields: ChatFields, check: Callable[[str], object]) -> np.ndarray:
        """Return the prompt of a chat, int32 `[T]`; its special tokens are those of the template, and of no message.

        `check` is called with its text before that is tokenised.
        """
        variables = dict(fields.chat_template_kwargs or {})
        reserved = sorted(x for x in variables if x in _RESERVED or x.endswith(_RESERVED_END))
        if reserved:
            raise ValueError(f"chat_template_kwargs must not have {', '.join(reserved)[:200]}")
        asks = fields.add_generation_prompt is not False
        if not self.has_template:
            text = _render_plainly(fields.messages, asks)
            check(text)
            return np.array(self.encoder.encode(text), np.int32)

        def render(messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
            if self.template is None:
                text = self.tokenizer.apply_chat_template(messages, asks, **variables)
            else:
                special = self.tokenizer.special_tokens if isinstance(self.tokenizer, HFTokenizer) else {}
                text = self.template.render(messages, asks, special, **variables)
            check(text)
            return text

        messages = [_to_template(message) for message in fields.messages]
        return np.array(self.encoder.encode_chat(render, messages, variables), np.int32)


def _to_template(message: Message) -> dict[str, str]:
    # Templates know the older name of this role.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text} | ({"name": message.name} if message.name else {})


def _render_plainly(messages: Sequence[Message], asks: bool) -> str:
    """Render a chat as `longctx chat` does: the system's text, such as a document, then questions and answers."""
    text = ""
    for message in messages:
        if message.role in ("system", "developer"):
            text += ("\n" if text else "") + message.text
        else:
            text += f"\nQ: {message.text}" if message.role == "user" else f"\nA: {message.text}"
    return f"{text}\nA: " if asks else text
