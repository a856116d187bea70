"""Parts of an answer: the text of one completion, read piece by piece, which each API writes in its own form."""

from typing import Literal, NamedTuple


class Part(NamedTuple):
    """Piece of an answer: reasoning, text, or a tool call.

    Attributes:
      text: of the reasoning or the answer, or JSON text of a call's arguments.
      number: of the tool call, from 0 on.
      name, call_id: of the tool, in the first part of a call alone.
    """

    kind: Literal["reasoning", "text", "tool_call"]
    text: str
    number: int = 0
    name: str | None = None
    call_id: str | None = None


class AnswerReader:
    """Reader of a completion that is text."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that more text completes."""
        return [Part("text", text)] if text else []

    def finish(self) -> list[Part]:
        """Return the parts that were held back until the end."""
        return []
