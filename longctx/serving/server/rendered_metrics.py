"""`RenderedMetrics`: metrics in Prometheus's text form, rendered seldom, however often somebody asks."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric

_INTERVAL = 0.25  # seconds between renderings: scrapers come every 50 ms, and rendering takes milliseconds


class RenderedMetrics(ABC):
    """A collector of `prometheus_client`; a subclass calls `_register` when it is whole."""

    def _register(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._rendering = threading.Lock()
        self._text, self._rendered = generate_latest(self._registry), time.monotonic()

    @abstractmethod
    def collect(self) -> Iterator[Metric]:
        """All families, for `prometheus_client`."""

    def render(self) -> bytes:
        """Prometheus's text, at most a quarter of a second old."""
        if time.monotonic() - self._rendered >= _INTERVAL and self._rendering.acquire(blocking=False):
            try:
                self._text, self._rendered = generate_latest(self._registry), time.monotonic()
            finally:
                self._rendering.release()
        return self._text
