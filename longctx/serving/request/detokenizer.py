"""Text as tokens come, ended by stop strings."""

from longctx.models.tokenizer import StreamDecoder, Tokenizer


class Detokenizer:
    """Pieces of text that join to the whole, no part of a stop string among them.

    `push` holds back what may begin a stop string; once a stop string is complete, `stopped` is true. Without a
    tokenizer there is no text.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        return "" if self._decoder is None or self.stopped else self._emit(self._decoder.push(token))

    def finish(self) -> str:
        """The text that was held back; a stop string may complete here."""
        if self._decoder is None or self.stopped:
            return ""
        piece = self._emit(self._decoder.finish())
        rest, self._held = self._held, ""
        return piece + rest

    def _emit(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
        if found >= 0:
            self.stopped, self._held = True, ""
            return text[:found]
        certain = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`, but is not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
