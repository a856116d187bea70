"""What was asked for and answered: the contents of a log that is not private."""

from typing import NamedTuple

from longctx.serving.distributed.orders import request_from_fields
from longctx.serving.recording.records import Content
from longctx.serving.request.request import Request


class RecordedRequest(NamedTuple):
    """A request, and the tokens of each of its completions, as far as they came."""

    request: Request
    tokens: list[list[int]]


def request_of(content: Content, request_id: str) -> Request:
    """A recorded request, with the seed that it had.

    Raises:
      ValueError: it is none.
    """
    try:
        sampling = content.fields["sampling"] | {"seed": content.seed}
        return request_from_fields(content.fields | {"sampling": sampling}, content.tokens, request_id)
    except (KeyError, TypeError) as error:
        raise ValueError(f"request {request_id!r} is not as this version of longctx records it: {error}") from None
