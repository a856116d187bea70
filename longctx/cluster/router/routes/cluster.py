"""`/cluster/*`: the instances of a cluster, who joins and leaves, and what they do."""

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from longctx.cluster.prefix_index.index import TIERS
from longctx.cluster.router.instance import Instance
from longctx.cluster.router.schemas import InstanceBody, RegisterBody, RoleBody
from longctx.cluster.router.server import RouterServer
from longctx.serving.server.errors import ApiError
from longctx.serving.server.gate import visitor_of
from longctx.serving.server.schemas.base import body_of


def cluster_router(server: RouterServer) -> APIRouter:
    """The routes; they need the key of an administrator, where there is one."""
    router = APIRouter(tags=["cluster"])
    instances = server.instances

    async def find(request: Request, kind: type[InstanceBody] = InstanceBody) -> tuple[Instance, Any]:
        _check(request)
        body = await server.bodies.fields(request, kind)
        found = [
            each for each in instances if each.name == body.name or each.client.url == (body.url or "").rstrip("/")
        ]
        if not found:
            raise ApiError(404, f"there is no instance {body.name or body.url!r}", "name", "instance_not_found")
        return found[0], body

    @router.get("/cluster/instances")
    async def list_instances(request: Request) -> JSONResponse:
        """All instances: their states, why some are not open, what they have to do and hold."""
        _check(request)
        return JSONResponse({"instances": describe(server), "indexed_blocks": server.index.num_blocks})

    @router.post("/cluster/register", openapi_extra=body_of(RegisterBody))
    async def register(request: Request) -> JSONResponse:
        """Add an instance, which joins when it answers; the same one again changes nothing."""
        _check(request)
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


def describe(server: RouterServer) -> list[dict[str, Any]]:
    """All instances, as JSON."""
    now = time.monotonic()
    views = {view.name: view._asdict() for view in server.conductor.instances(now)}
    publishers = server.feed.publishers
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


def _check(request: Request) -> None:
    if not visitor_of(request).is_admin:
        raise ApiError(403, "this needs the key of an administrator", code="admin_key_needed")
