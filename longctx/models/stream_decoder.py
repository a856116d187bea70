"""Decodes a stream of token ids to text."""

from __future__ import annotations

from longctx.models.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes token ids one by one and never returns part of a character.

    All pieces, including that of `finish()`, join to the text of all ids decoded at once.

    Args:
      tokenizer: what decodes the ids.

    Examples:
      >>> from longctx.models import ByteTokenizer, StreamDecoder
      >>> tokenizer = ByteTokenizer()
      >>> ids = tokenizer.encode("añ", add_special_tokens=False)  # ñ has two bytes
      >>> decoder = StreamDecoder(tokenizer)
      >>> [decoder.push(id) for id in ids]
      ['a', '', 'ñ']
      >>> decoder.finish()
      ''
    """

    # A character has at most four bytes, so an unfinished one has at most three tokens, or three U+FFFD.
    _UNFINISHED = 3

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Only recent tokens, so that the work of a step does not grow with the text. They include some settled tokens,
        # because the text of a token may depend on whether there is one before it.
        self._recent: list[int] = []
        self._settled = 0
        self._emitted = 0

    def push(self, id: int) -> str:
        """The text that is certain after this token: often that of the token, sometimes none."""
        self._recent.append(id)
        text = self._tokenizer.decode(self._recent)
        unsure = len(text) - len(text.rstrip("\ufffd"))
        if len(self._recent) - self._settled > self._UNFINISHED:
            # The first of these bytes are no character; the last of them may begin one.
            unsure = min(unsure, self._UNFINISHED)
        piece = self._emit(text, len(text) - unsure)
        if not unsure:
            self._recent = self._recent[self._settled :]
            self._settled = len(self._recent)
            self._emitted = len(self._tokenizer.decode(self._recent))
        return piece

    def finish(self) -> str:
        """The text that was held back."""
        text = self._tokenizer.decode(self._recent)
        return self._emit(text, len(text))

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece
