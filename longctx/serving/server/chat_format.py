"""How a chat becomes a prompt: by the tokenizer's chat template, or without one as plain questions and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longctx.models.chat_template import ChatTemplate
from longctx.models.tokenizer import HFTokenizer, Tokenizer
from longctx.serving.server.schemas.chat import ChatFields, Message

_RESERVED = frozenset({"messages", "add_generation_prompt", "special_tokens"})


@dataclass(frozen=True)
class ChatFormat:
    """Renders chats for a tokenizer; it may travel to other processes.

    Args:
      template: instead of the tokenizer's own.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None

    @property
    def has_template(self) -> bool:
        return self.template is not None or getattr(self.tokenizer, "chat_template", None) is not None

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer: a model without a template would go on with the next question."""
        return () if self.has_template else ("\nQ:",)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a rendered chat; a template's text has its special tokens already."""
        return self.tokenizer.encode(text, add_special_tokens=not self.has_template)

    def render(self, fields: ChatFields) -> str:
        """The prompt of a chat.

        Raises:
          ValueError: the template refuses the messages, or exceeds its limits.
        """
        variables = dict(fields.chat_template_kwargs or {})
        reserved = _RESERVED & set(variables)
        if reserved:
            raise ValueError(f"chat_template_kwargs must not have {', '.join(sorted(reserved))}")
        asks = fields.add_generation_prompt is not False
        if not self.has_template:
            return _render_plainly(fields.messages, asks)
        messages = [_to_template(message) for message in fields.messages]
        return self._apply(messages, asks, variables)

    def _apply(self, messages: Sequence[Mapping[str, Any]], asks: bool, variables: Mapping[str, Any]) -> str:
        if self.template is None:
            return self.tokenizer.apply_chat_template(messages, asks, **variables)
        special = self.tokenizer.special_tokens if isinstance(self.tokenizer, HFTokenizer) else {}
        return self.template.render(messages, asks, special, **variables)


def _to_template(message: Message) -> dict[str, str]:
    # Templates know the older name of this role.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text} | ({"name": message.name} if message.name else {})


def _render_plainly(messages: Sequence[Message], asks: bool) -> str:
    """As `longctx chat` does: what the system says, such as a document, then questions and answers."""
    text = ""
    for message in messages:
        if message.role in ("system", "developer"):
            text += ("\n" if text else "") + message.text
        else:
            text += f"\nQ: {message.text}" if message.role == "user" else f"\nA: {message.text}"
    return f"{text}\nA: " if asks else text
