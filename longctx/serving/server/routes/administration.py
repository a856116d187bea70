"""Ending requests."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from longctx.serving.server.frontend import Frontend
from longctx.serving.server.gate import visitor_of
from longctx.serving.server.schemas.base import body_of
from longctx.serving.server.schemas.other import AbortBody


def administration_router(server: Frontend) -> APIRouter:
    """The routes that need the key of an administrator, where there is one."""
    router = APIRouter(tags=["administration"])

    @router.post("/abort_requests", openapi_extra=body_of(AbortBody))
    @router.post("/abort_request", openapi_extra=body_of(AbortBody))
    async def abort_requests(request: Request) -> JSONResponse:
        """End requests: their clients get what there is, with `finish_reason` abort. Nobody ends another tenant's."""
        body, visitor = await server.bodies.fields(request, AbortBody), visitor_of(request)
        tenant = None if visitor.is_admin else visitor.tenant
        return JSONResponse({"aborted": [name for name in body.request_ids if server.abort(name, tenant)]})

    return router
