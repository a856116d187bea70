"""Log probabilities in the forms of OpenAI's two APIs. A token that is part of a character has bytes, and no text."""

import codecs
from collections.abc import Iterable

from longctx.models.tokenizer import TokenBytes
from longctx.serving.request.output import TokenLogprob
from longctx.serving.server.schemas.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

_LEAST = -9999.0  # JSON has no minus infinity


def token_text(token: bytes) -> str:
    """The text of a token; OpenAI writes one that is none as `bytes:` and its bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(token_bytes: TokenBytes, tokens: Iterable[int], logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Of tokens, in order."""
    content = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        own = token_bytes.of(token)
        top = []
        for other, value in logprob.top:
            its = token_bytes.of(other)
            top.append(TopLogprob(token_text(its), max(value, _LEAST), list(its)))
        content.append(ChatLogprob(token_text(own), max(logprob.logprob, _LEAST), list(own), top))
    return ChatLogprobs(content)


class LogprobLists:
    """Writes the lists of `/v1/completions`, piece by piece; `text_offset` counts characters of the choice's text."""

    def __init__(self, token_bytes: TokenBytes, offset: int = 0) -> None:
        self._bytes, self._offset = token_bytes, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprob | None]) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], [])
        for token, logprob in zip(tokens, logprobs, strict=True):
            own = self._bytes.of(token)
            name = token_text(own)
            lists.tokens.append(name)
            lists.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(own))
            if logprob is None:
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
                continue
            lists.token_logprobs.append(max(logprob.logprob, _LEAST))
            top = {token_text(self._bytes.of(other)): max(value, _LEAST) for other, value in logprob.top}
            lists.top_logprobs.append({name: max(logprob.logprob, _LEAST)} | top if top else {})
        return lists
