"""Page at `/`: static files of the package, and the routes that they use.

    GET /                page/index.html
    GET /page/static/NAME  a file of `page/`
    GET /page/model        the model, as the page shows it
    GET /page/example      a document and questions that the built-in model answers
    GET /page/events       server-sent events of the scheduler's steps, see `page_feed`

`/` and the files need no API key, as a browser sends none when it opens a page (`auth.OPEN_PREFIXES`); they hold
no data. The rest needs one, where there are keys.
"""

import mimetypes
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import StreamingResponse
from starlette.staticfiles import StaticFiles

from longctx.models import passkey
from longctx.models.builtin import TINY
from longctx.models.checkpoint import read_model
from longctx.serving.server.auth import client_of
from longctx.serving.server.page_feed import MAX_VIEWERS, EngineFeed, PageFeed, TooManyViewers
from longctx.serving.server.server import Server

DIRECTORY = Path(__file__).parent.with_name("page")
mimetypes.add_type("text/javascript", ".js")  # Python 3.11 says application/javascript
# Scripts and styles come from the page's own files alone, and text never becomes markup (trusted types).
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, by its ETag
}
# Documents for the built-in model. It answers 95 of 100 such questions; about these two all, as a test asserts.
EXAMPLES = {"book": (16_384, 4, 1), "note": (1_024, 4, 2)}  # bytes, facts, seed


class PageFiles(StaticFiles):
    """Static files of the page, with headers that let them run nothing else."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


@dataclass(frozen=True)
class PageModel:
    """Model as the page shows it.

    Attributes:
      has_chat: whether it has a chat template.
      max_length: of prompt and answer.
      is_cluster: whether many engines answer: the page shows them, and no steps.
    """

    name: str
    has_chat: bool
    max_length: int
    is_builtin: bool
    is_cluster: bool = False


@cache
def example_document(kind: str) -> passkey.Document:
    """Return one of `EXAMPLES`."""
    size, facts, seed = EXAMPLES[kind]
    return passkey.make_document(size, facts, seed)


def page_router(server: Server) -> APIRouter:
    """Return the page's routes for a server, whose engine's thread it watches from now on."""
    engine = server.engine
    is_builtin = engine.model.config == read_model(TINY)[0].config
    model = PageModel(server.model_name, server.chat_format.has_template, engine.max_length, is_builtin)
    feed = EngineFeed(server.thread)
    server.thread.on_step.append(feed.observe_step)
    server.thread.on_end.append(feed.observe_end)
    return page_routes(model, feed)


def page_routes(model: PageModel, feed: PageFeed) -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(include_in_schema=False)
    files = PageFiles(directory=DIRECTORY)

    @router.get("/")
    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    @router.get("/page/static/{name}")
    async def static(name: str, request: Request) -> Response:
        return await files.get_response(name, request.scope)

    @router.get("/page/model")
    async def about() -> PageModel:
        return model

    @router.get("/page/example")
    async def example(kind: str = Query("book", max_length=16)) -> dict[str, object]:
        if not model.is_builtin or kind not in EXAMPLES:
            raise HTTPException(404, f"there is no example {kind!r} for this model")
        document = example_document(kind)
        return {"name": f"{kind}.txt", "text": document.text, "questions": [*map(passkey.question, document.facts)]}

    @router.get("/page/events")
    async def events(request: Request) -> Response:
        client = client_of(request)
        tenant = None if client.sees_all else client.tenant
        if feed.num_viewers >= MAX_VIEWERS:
            raise HTTPException(503, f"{MAX_VIEWERS} pages watch this server already", {"retry-after": "10"})

        async def sent() -> AsyncIterator[bytes]:
            # Of several that come at once, the last may find no place any more: its stream ends, and it tries again.
            with suppress(TooManyViewers):
                async with aclosing(feed.messages(tenant)) as messages:
                    async for message in messages:
                        yield format_sse_event(data_str=message) if message else KEEPALIVE_COMMENT

        return StreamingResponse(sent(), headers={"cache-control": "no-store"}, media_type="text/event-stream")

    return router
