"""Token ids to text as they come."""

from __future__ import annotations

from longctx.models.tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids into text as they come, never half a character.

    The pieces, `finish()`'s included, join to the text of all ids decoded at once.
    """

    # A character has at most four bytes, so an unfinished one at most three tokens and three U+FFFD.
    _UNFINISHED = 3

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Recent tokens only, so that a step's work does not grow with the text. They reach back one
        # settled point more than needed: a token's text may depend on there being one before it.
        self._recent: list[int] = []
        self._settled = 0
        self._emitted = 0

    def push(self, id: int) -> str:
        """The text that this token makes certain; often the token's, sometimes nothing yet."""
        self._recent.append(id)
        text = self._tokenizer.decode(self._recent)
        unsure = len(text) - len(text.rstrip("\ufffd"))
        if len(self._recent) - self._settled > self._UNFINISHED:
            # These bytes are no character at all; but the last of them may begin one.
            unsure = min(unsure, self._UNFINISHED)
        piece = self._emit(text, len(text) - unsure)
        if not unsure:
            self._recent = self._recent[self._settled :]
            self._settled = len(self._recent)
            self._emitted = len(self._tokenizer.decode(self._recent))
        return piece

    def finish(self) -> str:
        """What was held back, as it is."""
        text = self._tokenizer.decode(self._recent)
        return self._emit(text, len(text))

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece
