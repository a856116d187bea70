"""What a router over many servers asks of each: to take no requests, and to give up cold pages."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from longctx.serving.server.errors import ApiError
from longctx.serving.server.gate import visitor_of
from longctx.serving.server.kv_events import block_hash
from longctx.serving.server.schemas.base import body_of
from longctx.serving.server.schemas.other import DrainBody, SwapBody
from longctx.serving.server.server import Server

_SWAP_SECONDS = 30.0


def instance_router(server: Server) -> APIRouter:
    """The routes of an instance of a cluster; they need the key of an administrator, where there is one."""
    router = APIRouter(tags=["instance"])

    @router.post("/drain", openapi_extra=body_of(DrainBody))
    async def drain(request: Request) -> JSONResponse:
        """Take no new requests from now on, or take some again; those that run go on."""
        _check(request)
        body = await server.bodies.fields(request, DrainBody)
        server.set_draining(body.drain)
        return JSONResponse({"draining": server.is_draining, "requests": len(server.calls)})

    @router.post("/kv_swap", openapi_extra=body_of(SwapBody))
    async def kv_swap(request: Request) -> JSONResponse:
        """Let blocks that nobody uses leave the devices or the host's memory; slower tiers keep what they have."""
        _check(request)
        body = await server.bodies.fields(request, SwapBody)
        if not server.engine.takes_handoffs:
            raise ApiError(409, "pages of an engine that is recorded stay", code="cannot_swap")
        wanted = frozenset(body.keys)
        evicted = server.engine.pages.evict(body.tier, lambda key: block_hash(key) in wanted)
        try:
            async with asyncio.timeout(_SWAP_SECONDS):
                return JSONResponse({"evicted": await asyncio.wrap_future(evicted)})
        except TimeoutError:
            raise ApiError(503, "no step has ended meanwhile", code="server_is_overloaded", retry_after=1.0) from None

    return router


def _check(request: Request) -> None:
    if not visitor_of(request).is_admin:
        raise ApiError(403, "this needs the key of an administrator", code="admin_key_needed")
