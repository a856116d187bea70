"""Reads bodies of requests: of a bounded size, in a bounded time, and not too many of them at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from longctx.serving.server.errors import DROPPED, ApiError
from longctx.serving.server.gate import too_large
from longctx.serving.server.read_call import parse
from longctx.serving.server.settings import ServerSettings

_Model = TypeVar("_Model", bound=BaseModel)

_LARGEST = 4  # bodies of the largest size that are held at once, or as many smaller ones
_RETRY = 1.0  # seconds


class Bodies:
    """Holds the bodies that are being sent or read, of a bounded size together: admission counts only what it knows."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, until it is not needed any more.

        It must be JSON by its header, which no form of a web page is.

        Raises:
          ApiError: it is none, too large, or too slow; or others fill the memory that there is for them.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(415, f"the header Content-Type must be application/json, got {kind[:80]!r}")
        parts: list[bytes] = []
        try:
            async for part in self._parts(request):
                parts.append(part)
            body = b"".join(parts)
            yield body
        finally:
            self._held -= sum(map(len, parts))

    async def _parts(self, request: Request) -> AsyncIterator[bytes]:
        """The body's parts, which are held from now on."""
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                async for part in request.stream():
                    size += len(part)
                    self._check(len(part), size)
                    yield part
        except TimeoutError:
            message = f"the body must be there within {self._settings.body_timeout:g} seconds"
            raise ApiError(408, message, headers={"connection": "close", "x-should-retry": "false"}) from None
        except ClientDisconnect:
            raise ApiError(400, "the client left while it sent the body") from None

    async def fields(self, request: Request, model: type[_Model]) -> _Model:
        """The fields of a body; ApiError as from `read`, or if they are not those of the model."""
        async with self.read(request) as body:
            return parse(model, body)

    def _check(self, more: int, size: int) -> None:
        """Hold some bytes more of a body, of this size with them."""
        most = self._settings.max_body_bytes
        if size > most:
            raise too_large(most)
        if self._held + more > _LARGEST * most:
            headers = {"connection": "close", DROPPED: "queue"}
            raise ApiError(429, "too many long prompts are being read", None, "slow_down", _RETRY, headers)
        self._held += more
