"""Whether the server lives, and whether it takes requests."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from longctx.serving.server.frontend import Frontend


def health_router(server: Frontend) -> APIRouter:
    """Routes for who watches the process. They wait for nothing, so they answer while a step runs or compiles."""
    router = APIRouter(tags=["health"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """200 while the engine lives, though it may be busy or warming up; else 503: the process should be ended."""
        problem = server.problem
        return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)

    @router.head("/ping", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    @router.get("/ping")
    async def ping() -> Response:
        """The same, by another name."""
        return await health()

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken: after warming up, and before shutting down."""
        problem = server.problem
        if problem is None and not server.is_warm:
            problem = "the server is not ready yet"
        if problem is None and server.is_draining:
            problem = "the server is shutting down"
        return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)

    return router
