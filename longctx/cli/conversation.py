"""`Conversation`: what has been said, as the tokens of the next prompt, which begin with those of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from longctx.models import Tokenizer
from longctx.models.chat_template import PLAIN_STOP, has_template
from longctx.models.tokenizer import HFTokenizer
from longctx.models.validation import shown
from longctx.serving import Output

NO_TEMPLATE = 'This model has no chat template: it gets "Q: MESSAGE" and "A: ", each on a line.'


class Document(NamedTuple):
    """A text of a file, which comes before a question."""

    name: str
    text: str


@dataclass(frozen=True)
class Turn:
    """A message of the user, the files before it, and its answer."""

    documents: tuple[Document, ...]
    question: str
    answer: str | None = None


class Prompt(NamedTuple):
    """Prompt that the model reads next: the text, its tokens, and the turn that it ends with.

    `is_rewritten` says that the chat template changed the text of earlier turns, so that from there on the model has to
    read again.
    """

    text: str
    tokens: list[int]
    turn: Turn
    is_rewritten: bool = False


@dataclass
class Conversation:
    """Turns, rendered by the tokenizer's chat template, or without one as plain questions and answers.

    A prompt is the tokens so far (the last prompt, and the answer as the model gave it) and those of what is new,
    whenever the template's text goes on like theirs. Otherwise it is the tokens of that text alone, of which an engine
    computes those after the first difference.
    """

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)  # that the next question comes with
    tokens: list[int] = field(default_factory=list)
    _text: str = ""  # of `tokens`

    @property
    def has_template(self) -> bool:
        return has_template(self.tokenizer)

    @property
    def stop(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return () if self.has_template else PLAIN_STOP

    def ask(self, question: str) -> Prompt:
        """The prompt for a question; `accept` what came of it."""
        turn = Turn(tuple(self.documents), question)
        self._check("the message", question)
        text = self._render([*self.turns, turn])
        whole = self._encode(text, is_start=True)
        if whole[: len(self.tokens)] == self.tokens:
            return Prompt(text, whole, turn)
        goes_on = text.startswith(self._text)
        if goes_on:
            # The model may write a text in other tokens than the tokenizer would. Its own stay, if what comes after
            # them is the same either way: not where a token would begin in the one and end in the other.
            new = self._encode(text[len(self._text) :], is_start=False)
            if new and whole[-len(new) :] == new:
                return Prompt(text, [*self.tokens, *new], turn)
        self._check_answers()
        return Prompt(text, whole, turn, is_rewritten=not goes_on)

    def attach(self, document: Document) -> None:
        """Put a document before the next question; ValueError: it has a control token."""
        self._check(document.name, f"{document.name}\n{document.text}")
        self.documents.append(document)

    def accept(self, prompt: Prompt, output: Output) -> None:
        """Take a prompt that was computed, and the answer to it."""
        tokens, text = self._answer(output)
        self._text, self.tokens = prompt.text + text, [*prompt.tokens, *tokens]
        self.turns.append(replace(prompt.turn, answer=output.text))
        self.documents = []

    def clear(self) -> None:
        """Forget all of it."""
        self.turns, self.documents, self.tokens, self._text = [], [], [], ""

    def _answer(self, output: Output) -> tuple[list[int], str]:
        """The tokens of an answer without those that ended it, and their text."""
        tokens = list(output.token_ids)
        if tokens and tokens[-1] in self.eos_ids:
            return tokens[:-1], output.text
        text = self.tokenizer.decode(tokens)
        while not output.text.startswith(text):  # a stop string, which is not part of the text
            tokens.pop()
            text = self.tokenizer.decode(tokens)
        return tokens, text

    def _control_token(self, text: str) -> str | None:
        return self.tokenizer.control_token(text) if isinstance(self.tokenizer, HFTokenizer) else None

    def _check(self, name: str, text: str) -> None:
        """Refuse a text that could end its message and begin another one, such as a system message."""
        token = self._control_token(text)
        if token is not None:
            raise ValueError(f"{name} has {shown(token)}, a control token: no message or file may have one")

    def _check_answers(self) -> None:
        """Refuse to read answers again in which the model spelled a control token in plain ones."""
        for turn in self.turns:
            token = self._control_token(turn.answer or "")
            if token is not None:
                raise ValueError(
                    f"an earlier answer has {shown(token)} as plain text, and has to be read again, as a control token "
                    "then: /new begins a new conversation"
                )

    def _encode(self, text: str, is_start: bool) -> list[int]:
        """A rendered template has its special tokens already."""
        return self.tokenizer.encode(text, add_special_tokens=is_start and not self.has_template)

    def _render(self, turns: Sequence[Turn]) -> str:
        if not self.has_template:
            return self._render_plainly(turns)
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in turns:
            messages.append({"role": "user", "content": self._content(turn)})
            if turn.answer is not None:
                messages.append({"role": "assistant", "content": turn.answer})
        return self.tokenizer.apply_chat_template(messages)

    def _render_plainly(self, turns: Sequence[Turn]) -> str:
        text = self.system or ""
        for turn in turns:
            if turn.documents:
                text += ("\n" if text else "") + "\n\n".join(document.text for document in turn.documents)
            text += f"\nQ: {turn.question}\nA: {turn.answer or ''}"
        return text

    def _content(self, turn: Turn) -> str:
        """A user's message to the template."""
        parts = [f"File {document.name}:\n\n{document.text}" for document in turn.documents]
        return "\n\n".join([*parts, turn.question])
