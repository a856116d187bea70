"""ASGI apps of servers: `make_app` for one engine, `app_of` for any `Frontend`."""

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from longctx.serving.server.auth import OPEN_PATHS, AuthMiddleware
from longctx.serving.server.errors import IGNORED, ApiError, error_response
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.limits import LIMIT_HEADERS
from longctx.serving.server.routes.administration import administration_router, monitoring_router
from longctx.serving.server.routes.internal import internal_router
from longctx.serving.server.routes.openai import caches_router, openai_router
from longctx.serving.server.routes.page import page_router
from longctx.serving.server.routes.responses import responses_router
from longctx.serving.server.schemas import bodies_described
from longctx.serving.server.server import Server

logger = logging.getLogger(__name__)


def make_app(server: Server) -> FastAPI:
    """Return the app of an engine's server."""
    make_routers = (administration_router, internal_router, page_router)
    return app_of(server, [make_router(server) for make_router in make_routers])


def probes_only(app: ASGIApp, server: Frontend, refusal: ApiError) -> ASGIApp:
    """Return the app of a connection that gets this answer to everything but whether the server lives."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            server.count_refusal(refusal)
            await error_response(scope["path"], refusal)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def app_of(server: Frontend, routers: Sequence[APIRouter]) -> FastAPI:
    """Return the app of a server. It starts the server when it is started, and closes it at its end."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        server.start()
        yield
        await server.finish()

    app = FastAPI(
        title="longctx",
        version=server.version,
        lifespan=life,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in (
        openai_router(server),
        caches_router(server),
        responses_router(server),
        monitoring_router(server),
        *routers,
    ):
        app.include_router(router)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(
        AuthMiddleware,
        settings=server.settings,
        keys=server.keys,
        audit=server.audit,
        http=server.http,
        count_refusal=server.count_refusal,
    )
    if server.settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.settings.allow_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # official clients have their own; which ones change
            expose_headers=["x-request-id", "retry-after", "retry-after-ms", IGNORED, *LIMIT_HEADERS],
        )
    _describe_bodies(app)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = _no_such_path(request)
    elif isinstance(error, HTTPException) and error.status_code == 405:
        error = ApiError(405, f"{request.url.path[:200]} takes no {request.method}", headers=error.headers)
    elif isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    elif isinstance(error, RequestValidationError):
        error = ApiError(400, "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors()))
    elif not isinstance(error, ApiError):
        logger.error("a request failed: %s", type(error).__name__)  # the traceback follows from elsewhere
        error = ApiError(500, "the server failed: its log says why", code="internal_error")
    return error_response(request.url.path, error)


def _no_such_path(request: Request) -> ApiError:
    """Return the answer to a path that is not there, with the API's paths that are."""
    paths = sorted(path for path in request.app.openapi()["paths"] if path.startswith("/v1/") and "{" not in path)
    return ApiError(404, f"there is no {request.url.path[:200]}: there are {', '.join(paths)}", code="unknown_url")


def _describe_bodies(app: FastAPI) -> None:
    """Add the schemas of bodies that routes read by themselves to OpenAPI's."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document.setdefault("components", {}).setdefault("schemas", {}).update(bodies_described())
        return document

    app.openapi = openapi  # type: ignore[method-assign]
