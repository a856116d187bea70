"""The bodies of all other routes."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from longctx.serving.request.request import Request
from longctx.serving.server.schemas.base import Body, TokenId
from longctx.serving.server.schemas.chat import Message
from longctx.serving.server.transfers import Prefill, TransferParams

BlockHash = Annotated[int, Field(ge=0, lt=2**64)]


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
    """A request of another server, as far as that has computed it, if it has; and who reads its prompt."""

    request: Request
    kv_transfer_params: TransferParams | None = None
    prefill: Prefill | None = None


class DrainBody(Body):
    """`drain`: take no new requests from now on; false: take some again."""

    drain: bool = True


class SwapBody(Body):
    """`keys`: of blocks, as KV events have them. `tier`: which they leave, while nobody uses them there."""

    keys: Annotated[list[BlockHash], Field(max_length=1_000_000, fail_fast=True)]
    tier: Literal["device", "host"]


class ProfileBody(Body):
    """Nothing: where a trace goes is the server's business."""
