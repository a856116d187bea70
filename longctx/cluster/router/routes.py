"""The routes of a router alone, and its app: instances of the cluster, how busy they are, and the page."""

import math
import time
from collections.abc import Callable
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
from longctx.serving.server.auth import Client, client_of
from longctx.serving.server.errors import ApiError
from longctx.serving.server.page_feed import PageFeed
from longctx.serving.server.routes.administration import own_load
from longctx.serving.server.routes.page import PageModel, page_routes
from longctx.serving.server.schemas import Body, body_of

_INTERVAL = 0.5  # seconds between two messages of the page
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Url = Annotated[str, Field(max_length=2048)]
_Proof = Annotated[str, Field(max_length=256)]


class ChallengeBody(Body):
    """A random text of a server that will register."""

    nonce: Annotated[str, Field(min_length=32, max_length=64)]


class RegisterBody(Body):
    """An instance at a URL, `http://HOST:PORT`; without a name, that is its host and port. `longctx serve --join`.

    Attributes:
      nonce, challenge: of `/cluster/challenge`.
      proof: HMAC of these and of url, name and role, under the secret of page keys.
    """

    url: _Url
    name: _Name | None = None
    role: Literal["prefill", "decode", "both"] = "both"
    nonce: _Proof
    challenge: _Proof
    proof: _Proof


class InstanceBody(Body):
    """An instance, by its name or URL."""

    name: _Name | None = None
    url: _Url | None = None


class RoleBody(InstanceBody):
    """The role of an instance from now on."""

    role: Literal["prefill", "decode", "both"]


def _check_own(client: Client, name: str | None) -> str:
    """Return the name of the instance whose key a client has; raise ApiError if it names another one."""
    if name not in (None, client.name):
        raise ApiError(403, f"the key is that of the instance {client.name}, not {name!r}", "name", "admin_key_needed")
    return client.name


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
        client = client_of(request)
        client.subject = str(body.name or url)
        if found is None:
            raise ApiError(404, f"there is no instance {body.name or body.url!r}", "name", "instance_not_found")
        if not client.is_admin:
            _check_own(client, found.name)
        return found, body

    @router.get("/cluster/instances")
    async def list_instances() -> JSONResponse:
        """All instances: their states, why some are not open, what they have to do and hold."""
        return JSONResponse({"instances": _describe(server), "indexed_blocks": server.index.num_blocks})

    @router.post("/cluster/challenge", openapi_extra=body_of(ChallengeBody))
    async def challenge(request: Request) -> JSONResponse:
        """Return what an instance has to sign to register, and the proof that this router knows the secret."""
        body = await server.bodies.fields(request, ChallengeBody)
        return JSONResponse(server.challenges.make(body.nonce))

    @router.post("/cluster/register", openapi_extra=body_of(RegisterBody))
    async def register(request: Request) -> JSONResponse:
        """Add an instance, which joins when it answers; the same one again changes nothing."""
        body, client = await server.bodies.fields(request, RegisterBody), client_of(request)
        name = body.name if client.is_admin else _check_own(client, body.name)
        if not server.challenges.is_proven(body.nonce, body.challenge, body.proof, body.url, body.name, body.role):
            message = "proof must be of a server that knows the secret of page keys: longctx serve --join"
            raise ApiError(403, message, "proof", "instance_not_proven")
        if not server.may_register(body.url):
            message = "url must be of this machine or of a host of --kv-peer"
            raise ApiError(403, message, "url", "instance_not_added")
        known = len(instances.by_name)
        try:
            instance = instances.add(body.url, name, body.role)
        except ValueError as error:
            raise ApiError(400, str(error), "url", "instance_not_added") from None
        if len(instances.by_name) > known:  # else it repeats its registration, as it does every few seconds
            client.subject = f"{instance.name} at {body.url}"
        return JSONResponse({"name": instance.name, "state": instance.state, "role": instance.role})

    def add(name: str, change: Callable[[Instance], object], description: str) -> None:
        @router.post(f"/cluster/{name}", openapi_extra=body_of(InstanceBody), name=name, description=description)
        async def command(request: Request) -> JSONResponse:
            instance, _ = await find(request)
            change(instance)
            return JSONResponse({"name": instance.name, "state": instance.state})

    add("remove", instances.drop, "Forget an instance; what it has goes on elsewhere.")
    add("drain", instances.drain, "Give an instance nothing more; what it has goes on.")
    add("restore", instances.restore, "The opposite of drain; one that was excluded may join again at once.")

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
            "token_usage": 0.0 if each.load is None else each.load.token_usage,
            "pages": each.info.max_total_num_tokens // each.info.page_size if each.is_member and each.info else 0,
            "estimates": views.get(each.name),
            "blocks": {tier: server.index.blocks(each.name, tier) for tier in TIERS},
            "kv_events": publishers[each.name]._asdict() if each.name in publishers else None,
        }
        for each in server.instances
    ]


def _loads_router(server: RouterServer) -> APIRouter:
    """Make the routes that say how busy the cluster is, and what it is."""
    router = APIRouter(tags=["introspection"])

    @router.get("/load")
    async def load(request: Request) -> JSONResponse:
        """Load of the cluster: its requests, its pools and each instance; without the scope, the client's own."""
        client, cluster = client_of(request), server.cluster
        if not client.sees_all:
            return JSONResponse(own_load(server, client.tenant))
        return JSONResponse(
            {
                "num_running_reqs": cluster.num_running,
                "num_waiting_reqs": cluster.num_waiting,
                "loads": {pool: _finite(value) for pool, value in server.loads().items()},
                "draining": server.is_draining,
                "time": time.time(),
                "instances": _describe(server),
            }
        )

    @router.get("/server_info")
    async def server_info() -> JSONResponse:
        """Description of the cluster, without paths and keys."""
        config = server.conductor.config
        return JSONResponse(
            {
                "version": server.version,
                "served_model_name": server.model_name,
                "max_model_len": server.max_length,
                "vocab_size": server.vocab_size,
                "instances": len(server.instances.members),
                "policy": server.conductor.policy_name,
                "admission": str(config.admission),
                "ttft": config.ttft,
                "tpot": config.tpot,
                "time": time.time(),
            }
        )

    return router


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

    def _message(self, is_first: bool) -> dict[str, Any]:
        server, instances = self._server, _describe(self._server)
        queues = [each["estimates"]["queue_seconds"] for each in instances if each["estimates"]]
        load = {
            "time": round(time.monotonic(), 3),
            "running": server.cluster.num_running,
            "waiting": server.cluster.num_waiting,
            "backlog": max(queues, default=0.0),
            "pages": sum(each["pages"] for each in instances),
            "cached": server.index.num_blocks,
            "held": [round(each["token_usage"] * each["pages"]) for each in instances],
        }
        pools = {name: _finite(round(value, 3)) for name, value in server.loads().items()}
        message = {"load": load, "steps": [], "skipped": 0, "reading": [], "ended": self._ended(is_first)}
        return message | {"instances": instances, "pools": pools}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
