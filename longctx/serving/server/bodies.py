"""Reads bodies of requests, of a bounded size, in a bounded time."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from longctx.serving.server.errors import ApiError
from longctx.serving.server.gate import too_large
from longctx.serving.server.read_call import parse
from longctx.serving.server.settings import ServerSettings

_Model = TypeVar("_Model", bound=BaseModel)


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body of a request, which must be JSON by its header: no form of a web page sends that unasked.

    Raises:
      ApiError: it is none, too large, or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"the header Content-Type must be application/json, got {kind[:80]!r}")
    parts, size = [], 0
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for part in request.stream():
                size += len(part)
                if size > settings.max_body_bytes:
                    raise too_large(settings.max_body_bytes)
                parts.append(part)
    except TimeoutError:
        message = f"the body must be there within {settings.body_timeout:g} seconds"
        raise ApiError(408, message, headers={"connection": "close", "x-should-retry": "false"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left while it sent the body") from None
    return b"".join(parts)


async def read_fields(request: Request, model: type[_Model], settings: ServerSettings) -> _Model:
    """The fields of a body; ApiError as from `read_body`, or if they are not those of the model."""
    return parse(model, await read_body(request, settings))
