"""Documents of caches, as whoever reads requests knows them: plain data, which may travel to other processes."""

from typing import NamedTuple

import numpy as np

from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.schemas.chat import Message


class Prefix(NamedTuple):
    """What is put before the prompts of requests that name a cache: tokens `[T]`, or messages of a chat.

    Attributes:
      num_bytes: of text and tokens, about: how long it takes to read a request with it.
    """

    cache_id: str
    tokens: np.ndarray | None
    messages: list[Message] | None
    num_bytes: int


class Document(NamedTuple):
    """A document that has been checked: its tokens `[T]` or messages, the request that reads it, and how long it is
    kept, in seconds."""

    tokens: np.ndarray | None
    messages: list[Message] | None
    prepared: PreparedRequest
    ttl: float

    def prefix(self, cache_id: str) -> Prefix:
        """What a cache of this document puts before prompts."""
        text = 0 if self.messages is None else sum(len(message.text) for message in self.messages)
        return Prefix(cache_id, self.tokens, self.messages, text + 4 * len(self.prepared.tokens))
