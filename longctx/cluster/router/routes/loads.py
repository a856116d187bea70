"""How busy a cluster is, by the names under which routers and balancers ask for it. `/v1/caches` is refused."""

import math
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from longctx.cluster.router.instance import Instance
from longctx.cluster.router.routes.cluster import describe
from longctx.cluster.router.server import RouterServer
from longctx.serving.server.errors import ApiError


def loads_router(server: RouterServer) -> APIRouter:
    """The routes that change nothing."""
    router = APIRouter(tags=["introspection"])

    @router.get("/load")
    async def load() -> JSONResponse:
        """How busy the cluster is: its requests, the loads of its pools, and each instance."""
        found = _total(server)
        loads = server.conductor.loads(server.now())._asdict()
        return JSONResponse(
            {
                "server_load": found["num_reqs"],
                **found,
                "loads": {pool: value if math.isfinite(value) else None for pool, value in loads.items()},
                "draining": server.is_draining,
                "time": time.time(),
                "instances": describe(server),
            }
        )

    @router.get("/loads")
    @router.get("/v1/loads")
    async def loads() -> JSONResponse:
        """The same, as a list of one for each member."""
        each = [_of(instance, rank) for rank, instance in enumerate(server.instances.members)]
        count = {"timestamp": time.time(), "version": server.version, "dp_rank_count": len(each)}
        return JSONResponse(count | {"loads": each})

    @router.get("/get_load")
    async def get_load() -> JSONResponse:
        """The same, as older routers ask for it."""
        return JSONResponse([_of(instance, rank) for rank, instance in enumerate(server.instances.members)])

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> JSONResponse:
        """What the cluster is. No path, no key."""
        config = server.conductor.config
        return JSONResponse(
            {
                "version": server.version,
                "served_model_name": server.model_name,
                "model_path": server.model_name,
                "max_model_len": server.max_length,
                "vocab_size": server.vocab_size,
                "instances": len(server.instances.members),
                "policy": server.policy_name,
                "admission": str(config.admission),
                "ttft": config.ttft,
                "tpot": config.tpot,
                "time": time.time(),
            }
        )

    @router.api_route("/v1/caches", methods=["GET", "POST"], include_in_schema=False)
    @router.api_route("/v1/caches/{cache_id}", methods=["GET", "DELETE"], include_in_schema=False)
    async def caches() -> None:
        """Documents are kept by instances, not by a cluster."""
        message = "a cluster keeps no documents by name: send the whole prompt, whose pages are found where they are"
        raise ApiError(501, message, code="caches_are_off", headers={"x-should-retry": "false"})

    return router


def _total(server: RouterServer) -> dict[str, Any]:
    cluster, members = server.cluster, [_of(each, 0) for each in server.instances.members]
    running = cluster.num_running
    return {
        "num_reqs": cluster.num_requests,
        "num_running_reqs": running,
        "num_waiting_reqs": cluster.num_requests - running,
        "num_used_tokens": sum(each["num_used_tokens"] for each in members),
        "max_total_num_tokens": sum(each["max_total_num_tokens"] for each in members),
        "backlog_seconds": max((each["backlog_seconds"] for each in members), default=0.0),
    }


def _of(instance: Instance, rank: int) -> dict[str, Any]:
    """What a member said last, by the names of an engine's `/load`."""
    load, info = instance.load, instance.info
    assert info is not None, "a member has said what it is"
    most = info.max_total_num_tokens
    used = 0 if load is None else round(load.token_usage * most)
    running = 0 if load is None else load.num_running_reqs
    waiting = 0 if load is None else load.num_waiting_reqs
    return {
        "dp_rank": rank,
        "instance": instance.name,
        "num_reqs": running + waiting,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_tokens": used,
        "num_used_tokens": used,
        "max_total_num_tokens": most,
        "token_usage": used / most,
        "backlog_seconds": 0.0 if load is None else load.backlog_seconds,
    }
