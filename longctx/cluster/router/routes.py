"""The routes of a router alone, and its app: instances of the cluster, how busy they are, and the page."""

import json
import math
import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from longctx.cluster.prefix_index.index import TIERS
from longctx.cluster.router.instances import Instance
from longctx.cluster.router.server import RouterServer
from longctx.models.builtin import TINY
from longctx.models.checkpoint import read_model
from longctx.serving.server.app import app_of
from longctx.serving.server.errors import ApiError
from longctx.serving.server.page_feed import PageFeed
from longctx.serving.server.routes.page import PageModel, page_routes
from longctx.serving.server.schemas import Body, body_of

_INTERVAL = 0.5  # seconds between two messages of the page
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Url = Annotated[str, Field(max_length=2048)]


class RegisterBody(Body):
    """An instance at a URL, `http://HOST:PORT`; without a name, that is its host and port."""

    url: _Url
    name: _Name | None = None
    role: Literal["prefill", "decode", "both"] = "both"


class InstanceBody(Body):
    """An instance, by its name or URL."""

    name: _Name | None = None
    url: _Url | None = None


class RoleBody(InstanceBody):
    """The role of an instance from now on."""

    role: Literal["prefill", "decode", "both"]


def make_router_app(server: RouterServer) -> FastAPI:
    """Make the ASGI app of a router."""
    routers = [_cluster_router(server), _loads_router(server), _page_router(server)]
    return app_of(server, routers)


def _cluster_router(server: RouterServer) -> APIRouter:
    """Make `/cluster/*`, which `AuthMiddleware` lets administrators alone use, where there are keys."""
    router = APIRouter(tags=["cluster"])
    instances = server.instances

    async def find(request: Request, kind: type[InstanceBody] = InstanceBody) -> tuple[Instance, Any]:
        body = await server.bodies.fields(request, kind)
        url = (body.url or "").rstrip("/")
        found = next((each for each in instances if each.name == body.name or each.client.url == url), None)
        if found is None:
            raise ApiError(404, f"there is no instance {body.name or body.url!r}", "name", "instance_not_found")
        return found, body

    @router.get("/cluster/instances")
    async def list_instances() -> JSONResponse:
        """All instances: their states, why some are not open, what they have to do and hold."""
        return JSONResponse({"instances": _describe(server), "indexed_blocks": server.index.num_blocks})

    @router.post("/cluster/register", openapi_extra=body_of(RegisterBody))
    async def register(request: Request) -> JSONResponse:
        """Add an instance, which joins when it answers; the same one again changes nothing."""
        body = await server.bodies.fields(request, RegisterBody)
        try:
            instance = instances.add(body.url, body.name, body.role)
        except ValueError as error:
            raise ApiError(400, str(error), "url", "instance_not_added") from None
        return JSONResponse({"name": instance.name, "state": instance.state, "role": instance.role})

    @router.post("/cluster/remove", openapi_extra=body_of(InstanceBody))
    async def remove(request: Request) -> JSONResponse:
        """Forget an instance; what it has goes on elsewhere."""
        instance, _ = await find(request)
        instances.drop(instance)
        return JSONResponse({"name": instance.name, "state": "removed"})

    @router.post("/cluster/drain", openapi_extra=body_of(InstanceBody))
    async def drain(request: Request) -> JSONResponse:
        """Give an instance nothing more; what it has goes on."""
        instance, _ = await find(request)
        instances.drain(instance)
        return JSONResponse({"name": instance.name, "state": instance.state})

    @router.post("/cluster/restore", openapi_extra=body_of(InstanceBody))
    async def restore(request: Request) -> JSONResponse:
        """The opposite of drain; one that was excluded may join again at once."""
        instance, _ = await find(request)
        instances.restore(instance)
        return JSONResponse({"name": instance.name, "state": instance.state})

    @router.post("/cluster/role", openapi_extra=body_of(RoleBody))
    async def set_role(request: Request) -> JSONResponse:
        """Change what an instance does: what it has goes on."""
        instance, body = await find(request, RoleBody)
        instances.set_role(instance, body.role)
        return JSONResponse({"name": instance.name, "role": instance.role})

    return router


def _describe(server: RouterServer) -> list[dict[str, Any]]:
    """Describe all instances, as JSON."""
    now = time.monotonic()
    views = {view.name: view._asdict() for view in server.conductor.instances(now)}
    publishers = server.events.publishers
    return [
        {
            "name": each.name,
            "url": each.client.url,
            "role": each.role,
            "state": each.state,
            "reason": each.reason or None,
            "requests": len(each.followers),
            "heard_seconds": round(now - each.heard, 3),
            "token_usage": None if each.load is None else each.load.token_usage,
            "estimates": views.get(each.name),
            "blocks": {tier: server.index.blocks(each.name, tier) for tier in TIERS},
            "kv_events": publishers[each.name]._asdict() if each.name in publishers else None,
        }
        for each in server.instances
    ]


def _loads_router(server: RouterServer) -> APIRouter:
    """Make routes by whose names other routers and balancers ask how busy a server is; `/v1/caches` is refused."""
    router = APIRouter(tags=["introspection"])

    @router.get("/load")
    async def load() -> JSONResponse:
        """Load of the cluster: its requests, the loads of its pools, and each instance."""
        cluster, members = server.cluster, _member_loads(server)
        return JSONResponse(
            {
                "server_load": cluster.num_requests,
                "num_reqs": cluster.num_requests,
                "num_running_reqs": cluster.num_running,
                "num_waiting_reqs": cluster.num_waiting,
                "num_used_tokens": sum(each["num_used_tokens"] for each in members),
                "max_total_num_tokens": sum(each["max_total_num_tokens"] for each in members),
                "backlog_seconds": max((each["backlog_seconds"] for each in members), default=0.0),
                "loads": {pool: _finite(value) for pool, value in server.loads().items()},
                "draining": server.is_draining,
                "time": time.time(),
                "instances": _describe(server),
            }
        )

    @router.get("/loads")
    @router.get("/v1/loads")
    async def loads() -> JSONResponse:
        """The same, as a list of one for each member."""
        each = _member_loads(server)
        count = {"timestamp": time.time(), "version": server.version, "dp_rank_count": len(each)}
        return JSONResponse(count | {"loads": each})

    @router.get("/get_load")
    async def get_load() -> JSONResponse:
        """The same, as older routers ask for it."""
        return JSONResponse(_member_loads(server))

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> JSONResponse:
        """Description of the cluster, without paths and keys."""
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


def _member_loads(server: RouterServer) -> list[dict[str, Any]]:
    """Return what each member said last, by the names of an engine's `/load`."""
    found = []
    for rank, instance in enumerate(server.instances.members):
        load, info = instance.load, instance.info
        assert info is not None, "a member has said what it is"
        most = info.max_total_num_tokens
        used = 0 if load is None else round(load.token_usage * most)
        running = 0 if load is None else load.num_running_reqs
        waiting = 0 if load is None else load.num_waiting_reqs
        found.append(
            {
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
        )
    return found


def _page_router(server: RouterServer) -> APIRouter:
    """Make the page of a router: that of a server, with its instances in place of the scheduler's steps."""
    is_builtin = server.model == read_model(TINY)[0].config
    has_chat = server.chat_format.has_template
    model = PageModel(server.model_name, has_chat, server.max_length, is_builtin, is_cluster=True)
    feed = _ClusterFeed(server)
    server.cluster.on_end.append(feed.observe_end)
    return page_routes(model, feed)


class _ClusterFeed(PageFeed):
    """Messages of a router's page, about its requests and instances. For the event loop."""

    def __init__(self, server: RouterServer) -> None:
        super().__init__(_INTERVAL)
        self._server = server

    def _message(self, is_first: bool) -> str:
        server = self._server
        instances = [*self._instances()]
        load = {
            "time": round(time.monotonic(), 3),
            "running": server.cluster.num_running,
            "waiting": server.cluster.num_waiting,
            "backlog": max((each["queue"] or 0.0 for each in instances), default=0.0),
            "pages": sum(each["pages"] for each in instances),
            "cached": server.index.num_blocks,
            "held": [each["held"] for each in instances],
        }
        pools = {name: _finite(round(value, 3)) for name, value in server.loads().items()}
        message = {"load": load, "steps": [], "skipped": 0, "reading": [], "ended": self._ended(is_first)}
        return json.dumps(message | {"instances": instances, "pools": pools}, separators=(",", ":"))

    def _instances(self) -> Iterable[dict[str, Any]]:
        server = self._server
        views = {view.name: view for view in server.conductor.instances(server.now())}
        for each in server.instances:
            view, info = views.get(each.name), each.info
            pages = 0 if info is None or view is None else info.max_total_num_tokens // info.page_size
            yield {
                "name": each.name,
                "role": each.role,
                "state": each.state,
                "reason": each.reason,
                "queue": None if view is None else round(view.queue_seconds, 3),
                "decoding": 0 if view is None else view.decoding,
                "requests": 0 if view is None else view.open_requests,
                "pages": pages,
                "held": 0 if each.load is None else round(each.load.token_usage * pages),
                "blocks": [server.index.blocks(each.name, tier) for tier in TIERS],
            }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
