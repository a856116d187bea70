"""The model and its metrics, by the names under which clients, routers and Prometheus ask for them."""

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from longctx.serving.server.errors import ApiError
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.prometheus import CONTENT_TYPE


def models_router(server: Frontend) -> APIRouter:
    """The routes that change nothing, and are the same for an engine and for many."""
    router = APIRouter(tags=["introspection"])
    started = int(time.time())

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "longctx",
            "root": server.model_name,
            "parent": None,
            "max_model_len": server.max_length,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The names of the model."""
        return {"object": "list", "data": [model(name) for name in server.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model_named(name: str) -> dict[str, Any]:
        """The model by one of its names."""
        if name not in server.model_names:
            raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")
        return model(name)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of longctx."""
        return {"version": server.version}

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        """What the model is."""
        return {
            "model_path": server.model_name,
            "served_model_name": server.model_name,
            "is_generation": True,
            "max_model_len": server.max_length,
            "vocab_size": server.vocab_size,
            "has_chat_template": server.chat_format.has_template,
        }

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(server.metrics.render(), media_type=CONTENT_TYPE)

    return router
