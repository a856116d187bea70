"""`ClusterBackend`: answers requests by the instances of a cluster, as an engine's thread does by its engine."""

import asyncio
import itertools
import time
from collections.abc import Callable

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.request import ClusterRequest, Rejection
from longctx.cluster.router.instances import Instances
from longctx.cluster.router.rejections import rejected
from longctx.cluster.router.routed_request import RoutedRequest, Routing
from longctx.cluster.router.router_stats import RouterStats
from longctx.serving.engine.departure import Sink
from longctx.serving.request.output import Output
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.server.errors import ApiError
from longctx.serving.server.transfers import Received

MOST_ID = 200
"""Characters of a request's id that instances are told: the last ones, which make it unique."""


class ClusterBackend:
    """A `Backend` of one event loop.

    Args:
      failures: where answers to requests that fail after they have begun are left, see `Frontend`.
      flush: is called after sinks.

    Attributes:
      on_end: are called with each completion that ends, and its request.
    """

    def __init__(
        self,
        conductor: Conductor,
        instances: Instances,
        vocab_size: int,
        max_length: int,
        failures: dict[str, ApiError],
        flush: Callable[[], object],
    ) -> None:
        self.stats = RouterStats(max_length)
        self.on_end: list[Callable[[Output, Request], object]] = []
        self._routing = Routing(
            conductor, instances, self.stats, vocab_size, time.monotonic, failures, flush, self._note_end
        )
        self._requests: dict[str, tuple[RoutedRequest, asyncio.Task[None]]] = {}
        self._ids = map("request-{}".format, itertools.count())

    @property
    def num_running(self) -> int:
        """Requests that have had a token."""
        return sum(routed.has_tokens for routed, _ in self._requests.values())

    @property
    def num_requests(self) -> int:
        """That have not ended."""
        return len(self._requests)

    def submit(
        self, prepared: PreparedRequest, sink: Sink, arrival: float | None = None, received: Received | None = None
    ) -> str:
        """Begin a request; its id.

        Raises:
          TypeError, ValueError: it can never be served.
          ApiError: it is rejected now.
        """
        assert received is None, "instances move pages among themselves"
        routing, stats = self._routing, self.stats
        now = routing.clock()
        name = (prepared.request.request_id or next(self._ids))[-MOST_ID:]
        if name in self._requests:
            raise ValueError(f"request_id must be unique, and {name!r} has not ended yet")
        request = cluster_request(prepared, name)
        decision = routing.conductor.assign(request, now)
        if isinstance(decision, Rejection) and not decision.is_deferred:
            stats.note_rejection(decision)
            raise rejected(decision)
        routed = RoutedRequest(routing, prepared, request, now if arrival is None else arrival, sink)
        task = asyncio.get_running_loop().create_task(routed.run(decision), name=f"request {name}")
        self._requests[name] = routed, task
        task.add_done_callback(lambda task: self._forget(name, routed, task))
        return name

    def cancel(self, request_id: str) -> bool:
        """End a request; False if it is unknown or has ended. Its sink gets its last events before this returns."""
        found = self._requests.get(request_id)
        if found is None:
            return False
        routed, task = found
        routed.end("cancelled")
        task.cancel()
        return True

    async def close(self) -> None:
        """End all requests."""
        tasks = [task for _, task in self._requests.values()]
        for name in tuple(self._requests):
            self.cancel(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, name: str, routed: RoutedRequest, task: "asyncio.Task[None]") -> None:
        routed.end("cancelled")  # a task that never ran has not said so
        self._routing.conductor.cancelled(name, self._routing.clock())
        self._requests.pop(name, None)
        if not task.cancelled():
            task.exception()

    def _note_end(self, output: Output, prepared: PreparedRequest) -> None:
        self.stats.note_end(output, prepared.request)
        for call in self.on_end:
            call(output, prepared.request)


def cluster_request(prepared: PreparedRequest, name: str) -> ClusterRequest:
    """A request as the conductor sees it."""
    request = prepared.request
    first = b"".join(key[:8] for key in prepared.shared_keys)  # as KV events have them
    return ClusterRequest(
        name,
        len(prepared.tokens),
        request.sampling.max_tokens * request.sampling.n,
        np.frombuffer(first, ">u8").astype(np.uint64),
        request.ttft_deadline,
        request.tpot_target,
        request.priority,
    )
