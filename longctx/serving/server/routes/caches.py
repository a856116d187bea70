"""`/v1/caches`: documents that are read once, and named by later requests."""

from fastapi import APIRouter, Request, Response

from longctx.serving.server.documents import Document
from longctx.serving.server.gate import visitor_of
from longctx.serving.server.routes.generation import origin_of
from longctx.serving.server.schemas.base import body_of
from longctx.serving.server.schemas.caches import CacheBody, CacheDeleted, CacheList
from longctx.serving.server.schemas.responses import encode
from longctx.serving.server.server import Server


def caches_router(server: Server) -> APIRouter:
    """The routes of caches. Each tenant has its own; of others' it learns nothing."""
    router = APIRouter(tags=["caches"])

    @router.post("/v1/caches", openapi_extra=body_of(CacheBody))
    async def create_cache(request: Request) -> Response:
        """Read a document when there is nothing more urgent, and keep its pages; it answers at once."""
        server.check_accepting()
        visitor = visitor_of(request)
        async with server.bodies.read(request) as body:
            document: Document = await server.preparer.read("cache", body, origin_of(request))
        return _json(server.caches.create(visitor.tenant, document))

    @router.get("/v1/caches")
    async def list_caches(request: Request) -> Response:
        """The tenant's caches."""
        return _json(CacheList(server.caches.of(visitor_of(request).tenant)))

    @router.get("/v1/caches/{cache_id}")
    async def get_cache(request: Request, cache_id: str) -> Response:
        """One of them: how far it is read, and where its pages are."""
        return _json(server.caches.get(visitor_of(request).tenant, cache_id))

    @router.delete("/v1/caches/{cache_id}")
    async def delete_cache(request: Request, cache_id: str) -> Response:
        """Let its pages go."""
        server.caches.delete(visitor_of(request).tenant, cache_id)
        return _json(CacheDeleted(cache_id))

    return router


def _json(answer: object) -> Response:
    return Response(encode(answer), media_type="application/json")
