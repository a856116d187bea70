"""The page of a router: that of a server, with its instances in place of the scheduler's steps."""

from fastapi import APIRouter

from longctx.cluster.router.cluster_feed import ClusterFeed
from longctx.cluster.router.server import RouterServer
from longctx.models.builtin import TINY
from longctx.models.checkpoint import read_model
from longctx.serving.server.routes.page import PageModel, page_routes


def cluster_page_router(server: RouterServer) -> APIRouter:
    """The page of a router, which watches it from now on."""
    is_builtin = server.model == read_model(TINY)[0].config
    has_chat = server.chat_format.has_template
    model = PageModel(server.model_name, has_chat, server.max_length, is_builtin, is_cluster=True)
    feed = ClusterFeed(server)
    server.cluster.on_end.append(feed.observe_end)
    return page_routes(model, feed)
