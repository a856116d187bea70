"""Caches of a cluster: documents that an instance reads, and whose pages it keeps."""

import asyncio
import logging

import httpx

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.router.instance_client import ProtocolError
from longctx.cluster.router.instances import Instance, Instances
from longctx.serving.engine.active_request import Sink
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.caches import CachePages, Caches
from longctx.serving.server.frontend import Backend
from longctx.serving.server.kv_events import block_hashes

logger = logging.getLogger(__name__)


class ClusterCaches(Caches):
    """Caches of a router. Its quota is of all instances together.

    The instance that answers a request keeps the pages, and counts them for the tenant's quota there, too.
    """

    _advice = "start the instances with --kv-host-bytes"

    def __init__(
        self,
        model_name: str,
        page_size: int,
        quota: int | None,
        max_ttl: float,
        backend: Backend,
        instances: Instances,
        index: PrefixIndex,
    ) -> None:
        super().__init__(model_name, page_size, quota, max_ttl)
        self._backend, self._instances, self._index = backend, instances, index
        self._releases: set[asyncio.Task[None]] = set()

    def _submit(self, prepared: PreparedRequest, sink: Sink) -> str:
        return self._backend.submit(prepared, sink)

    def _cancel(self, request_id: str) -> object:
        return self._backend.cancel(request_id)

    def _room(self) -> int:
        """Return half of the host memory of all instances, which is the least that they can keep."""
        return sum(each.info.cache_blocks[1] // 2 for each in self._instances.members if each.info is not None)

    def _count(self, keys: list[Key]) -> CachePages:
        return CachePages(len(keys), **self._index.count_by_tier(block_hashes(keys)))

    def _unpin(self, keys: list[Key]) -> None:
        kept = self._seconds_left(keys)
        released = block_hashes([key for key in keys if key not in kept]).tolist()
        for instance in self._instances.members if released else ():
            task = asyncio.create_task(self._release(instance, released))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, instance: Instance, keys: list[int]) -> None:
        try:
            await instance.client.swap(keys, "pins")
        except (httpx.HTTPError, ProtocolError) as error:
            logger.warning("longctx: %s keeps pages of a cache that is deleted: %s", instance.name, error)
