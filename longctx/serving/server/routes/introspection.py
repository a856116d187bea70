"""What the engine is and how busy it is, by the names under which clients, routers and balancers ask for it."""

import dataclasses
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from longctx.serving.server.server import Server


def introspection_router(server: Server) -> APIRouter:
    """The routes that change nothing."""
    router = APIRouter(tags=["introspection"])

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> JSONResponse:
        """The engine's sizes and rules. No path, no key."""
        info = _server_info(server)
        if server.transfers is not None:
            info["kv_transfer"] = server.transfers.info()
        return JSONResponse(info)

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
