"""`make_router_app`: the ASGI app of a router."""

from fastapi import FastAPI

from longctx.cluster.router.routes.cluster import cluster_router
from longctx.cluster.router.schemas import InstanceBody, RegisterBody, RoleBody
from longctx.cluster.router.server import RouterServer
from longctx.serving.server.app import COMMON_BODIES, app_of


def make_router_app(server: RouterServer) -> FastAPI:
    """The app."""
    return app_of(server, [cluster_router(server)], [*COMMON_BODIES, InstanceBody, RegisterBody, RoleBody])
