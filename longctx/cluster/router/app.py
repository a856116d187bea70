"""`make_router_app`: the ASGI app of a router."""

from fastapi import FastAPI

from longctx.cluster.router.routes.cluster import cluster_router
from longctx.cluster.router.routes.loads import loads_router
from longctx.cluster.router.routes.page import cluster_page_router
from longctx.cluster.router.schemas import InstanceBody, RegisterBody, RoleBody
from longctx.cluster.router.server import RouterServer
from longctx.serving.server.app import COMMON_BODIES, app_of


def make_router_app(server: RouterServer) -> FastAPI:
    """The app."""
    routers = [cluster_router(server), loads_router(server), cluster_page_router(server)]
    return app_of(server, routers, [*COMMON_BODIES, InstanceBody, RegisterBody, RoleBody])
