"""What the server serves and how busy it is, by the names under which clients, routers and balancers ask for it."""

import dataclasses
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from longctx.serving.server.errors import ApiError
from longctx.serving.server.prometheus import CONTENT_TYPE
from longctx.serving.server.server import Server


def introspection_router(server: Server) -> APIRouter:
    """The routes that change nothing."""
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
            "max_model_len": server.engine.max_length,
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

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> JSONResponse:
        """The engine's sizes and rules. No path, no key."""
        info = _server_info(server)
        if server.transfers is not None:
            info["kv_transfer"] = server.transfers.info()
        return JSONResponse(info)

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        """What the model is."""
        config = server.engine.model.config
        return {
            "model_path": server.model_name,
            "served_model_name": server.model_name,
            "is_generation": True,
            "max_model_len": server.engine.max_length,
            "vocab_size": config.vocab_size,
            "has_chat_template": server.chat_format.has_template,
        }

    @router.get("/load")
    async def load() -> dict[str, Any]:
        """How busy the server is: requests that have not ended, and more."""
        return {"server_load": _load(server)["num_running_reqs"] + _load(server)["num_waiting_reqs"], **_load(server)}

    @router.get("/loads")
    @router.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """The same, as a list of one."""
        return {"timestamp": time.time(), "version": server.version, "dp_rank_count": 1, "loads": [_load(server)]}

    @router.get("/get_load")
    async def get_load() -> list[dict[str, Any]]:
        """The same, as older routers ask for it."""
        return [_load(server)]

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(server.metrics.render(), media_type=CONTENT_TYPE)

    return router


def _load(server: Server) -> dict[str, Any]:
    load = server.thread.load
    page_size, config = server.engine.config.page_size, server.engine.config
    return {
        "dp_rank": 0,
        "num_reqs": load.running + load.waiting,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_tokens": load.waiting_tokens,
        "num_tokens": load.pages_held * page_size,
        "num_used_tokens": load.pages_held * page_size,
        "max_total_num_tokens": load.num_pages * page_size,
        "token_usage": load.cache_usage,
        "max_running_requests": config.max_running,
        "backlog_seconds": load.backlog_seconds,
        "num_pages": load.num_pages,
        "free_pages": load.free_pages,
        "pages_by_rank": list(load.pages_by_rank),
    }


def _server_info(server: Server) -> dict[str, Any]:
    engine = server.engine
    config = {
        field.name: getattr(engine.config, field.name)
        for field in dataclasses.fields(engine.config)
        if field.name not in ("hash_key", "policy", "slo")
    }
    return {
        "version": server.version,
        "served_model_name": server.model_name,
        "model_path": server.model_name,
        "max_model_len": engine.max_length,
        "tp_size": engine.plan.tensor,
        "dp_size": 1,
        "num_pages": engine.num_pages * engine.plan.context,
        "max_total_num_tokens": engine.num_pages * engine.plan.context * engine.config.page_size,
        "plan": dataclasses.asdict(engine.plan),
        "engine": config | {"policy": str(engine.config.policy), "slo": dataclasses.asdict(engine.config.slo)},
    }
