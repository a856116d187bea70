"""`RouterMetrics`: what a router does, in Prometheus's text form."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric

if TYPE_CHECKING:
    from longctx.cluster.router.server import RouterServer

_INTERVAL = 0.25


class RouterMetrics:
    """Counts what a router does from now on, and renders it."""

    def __init__(self, prefix: str, server: "RouterServer") -> None:
        self._prefix, self._server = prefix, server
        self._labels = {"model_name": server.model_name}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from ()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def observe_refusal(self, reason: str) -> None:
        self._server.cluster.stats.refusals[reason] += 1
