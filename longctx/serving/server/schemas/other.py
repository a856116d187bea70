"""The bodies of all other routes."""

from typing import Annotated

from pydantic import Field, model_validator

from longctx.serving.request.request import Request
from longctx.serving.server.schemas.base import Body, TokenId
from longctx.serving.server.schemas.chat import Message
from longctx.serving.server.transfers import TransferParams


class TokenizeBody(Body):
    """Either `prompt`, or `messages` of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be there, and not both")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class AbortBody(Body):
    """Ids as the clients sent them in `x-request-id`, or as they stand in answers."""

    request_ids: Annotated[list[str], Field(max_length=1000, fail_fast=True)]


class MigrateBody(Body):
    """`to`: the other server, as `http://HOST:PORT`. `request_ids`: as in `AbortBody`; null: all. `drain`: take no new
    requests from now on."""

    to: Annotated[str, Field(max_length=2048)]
    request_ids: Annotated[list[str], Field(max_length=1000, fail_fast=True)] | None = None
    drain: bool = True


class ResumeBody(Body):
    """A request of another server, as far as that has computed it."""

    request: Request
    kv_transfer_params: TransferParams


class ProfileBody(Body):
    """Nothing: where a trace goes is the server's business."""
