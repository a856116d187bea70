"""`EngineExporter`: the leases of an engine, as senders of pages ask for them."""

from longctx.cluster.transfer.lease import Lease
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.page_transfers import LEASE_SECONDS
from longctx.serving.kv_cache.connector import PageRead
from longctx.serving.kv_cache.page_layout import PageLayout


class EngineExporter:
    """An `Exporter` of an engine. Any thread may call it; nothing waits for a step.

    Args:
      layout: of the engine's pages.
    """

    def __init__(self, engine: Engine, layout: PageLayout) -> None:
        self._pages, self._layout, self._now = engine.pages, layout, engine.now

    def open(self, lease_id: str) -> Lease:
        """The lease with this id; while its request runs, its pages are not known yet. Raises LeaseGone."""
        lease = self._pages.lease(lease_id)
        pages = [*lease.pages, *[0] * (len(lease.keys) - len(lease.pages))]
        tail = lease.total % self._layout.page_size
        return Lease(lease_id, list(lease.keys), pages, tail, lease.total, self._layout, self._now() + LEASE_SECONDS)

    def num_ready(self, lease_id: str) -> int:
        """How many leading pages are complete. Raises LeaseGone."""
        return len(self._pages.lease(lease_id).pages)

    def read(self, lease_id: str, first: int, stop: int, layers: tuple[int, int]) -> PageRead:
        """Begin to read complete pages `first` to `stop`, of these layers at least. Raises LeaseGone."""
        return self._pages.read(lease_id, first, stop, layers)

    def release(self, lease_id: str) -> None:
        """Nobody needs a lease any more."""
        self._pages.release(lease_id)
