"""Calls of clients: where they come from, and what the parser of requests makes of them. Plain data."""

from typing import Literal, NamedTuple

import numpy as np

from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.answer_parts import AnswerFormat, AnswerReader
from longctx.serving.server.chat_schemas import Message
from longctx.serving.server.responses_body import History
from longctx.serving.server.schemas import Body, GenerationBody

Kind = Literal[
    "completions", "chat", "messages", "count_tokens", "responses", "embeddings", "tokenize", "detokenize", "cache"
]
"""The methods of `RequestParser`."""


class Prefix(NamedTuple):
    """Beginning of the prompts of requests that name a cache: tokens `[T]`, or messages of a chat.

    Attributes:
      num_bytes: of text and tokens, about: parsing a request with it takes as long as with this many bytes.
    """

    cache_id: str
    tokens: np.ndarray | None
    messages: list[Message] | None
    num_bytes: int


class Document(NamedTuple):
    """A checked document of a cache: its tokens `[T]` or messages, the request that reads it, and its life in seconds.

    `ignored`: names of fields that are not known. It is plain data, which may travel to other processes.
    """

    tokens: np.ndarray | None
    messages: list[Message] | None
    prepared: PreparedRequest
    ttl: float
    ignored: tuple[str, ...] = ()

    def prefix(self, cache_id: str) -> Prefix:
        """Return the prefix of prompts that a cache of this document makes."""
        text = 0 if self.messages is None else sum(len(message.text) for message in self.messages)
        return Prefix(cache_id, self.tokens, self.messages, text + 4 * len(self.prepared.tokens))


class Origin(NamedTuple):
    """Source of a call: its tenant, the id of its requests, and targets that its headers bring, in seconds.

    `prefix`: of the cache that its body names. `history`: stored items that it names.
    """

    tenant: str = ""
    request_id: str | None = None
    ttft: float | None = None
    tpot: float | None = None
    prefix: Prefix | None = None
    history: History | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes, about, that are parsed beside the body."""
        prefix = 0 if self.prefix is None else self.prefix.num_bytes
        return prefix + (0 if self.history is None else self.history.num_bytes)


class ParsedCall(NamedTuple):
    """A client's call, ready for the engine.

    Attributes:
      body: without its prompts.
      requests: one for each prompt.
      texts: of the prompts, where the answer repeats them.
      copies: how many choices each completion makes: more than one where all would be the same.
      answer: what the answers of a chat may have besides text; None: nothing.
      ignored: names of fields that are not known.
      source: the body of another API that the chat was made of.
    """

    body: GenerationBody
    requests: list[PreparedRequest]
    texts: list[str]
    copies: int
    answer: AnswerFormat | None = None
    ignored: tuple[str, ...] = ()
    source: Body | None = None

    def new_reader(self) -> AnswerReader:
        """Return a reader of the text of one completion."""
        return AnswerReader(self.answer or AnswerFormat())

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.copies * self.requests[0].request.sampling.n
