"""`CallStream`: an answer in pieces, whose call ends with it."""

from collections.abc import AsyncIterator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from longctx.serving.server.frontend import Frontend


class CallStream(StreamingResponse):
    """Sends the pieces of a call's answer; the call ends with it, however it ends."""

    def __init__(
        self,
        server: Frontend,
        call_id: str,
        pieces: AsyncIterator[bytes],
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(pieces, headers=headers, media_type=media_type)
        self._server, self._call_id = server, call_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._server.end(self._call_id)
