"""The body of `/v1/caches`, and what its routes answer."""

from typing import Annotated, Any

from msgspec import Struct
from pydantic import Field, model_validator

from longctx.serving.server.schemas.base import Body, TokenIds
from longctx.serving.server.schemas.chat import Message


class CacheBody(Body):
    """A document, which is the beginning of prompts: `prompt` (a text or token ids), or `messages` of a chat.

    `ttl`: seconds for which its pages are kept.
    """

    model: str | None = None
    prompt: Annotated[str | TokenIds, Field(union_mode="left_to_right")] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    ttl: float = Field(3600.0, gt=0, le=1e9)

    @model_validator(mode="after")
    def _one_of_two(self) -> "CacheBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be there, and not both")
        return self


class CachePages(Struct):
    """Full pages of a document, and how many of them are on the devices, in host memory and on disk."""

    total: int
    device: int
    host: int
    disk: int


class CacheAnswer(Struct):
    """A cache. `status`: `"reading"`, `"ready"`, or `"failed"`; `read_tokens`: of `tokens`, how many are computed."""

    id: str
    model: str
    status: str
    created: int
    expires_at: int
    tokens: int
    read_tokens: int
    pages: CachePages
    object: str = "cache"
    error: str | None = None


class CacheList(Struct):
    """The caches of a tenant, the newest first."""

    data: list[Any]
    object: str = "list"


class CacheDeleted(Struct):
    id: str
    object: str = "cache.deleted"
    deleted: bool = True
