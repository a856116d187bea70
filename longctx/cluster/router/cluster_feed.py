"""`ClusterFeed`: what viewers of a router's page are told of its requests and instances."""

import json
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from longctx.cluster.prefix_index.index import TIERS
from longctx.serving.server.page_feed import PageFeed, describe_output

if TYPE_CHECKING:
    from longctx.cluster.router.server import RouterServer

INTERVAL = 0.5  # seconds between two messages


class ClusterFeed(PageFeed):
    """Messages for all viewers of one router; for the event loop."""

    def __init__(self, server: "RouterServer", interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._server = server

    def _has_news(self) -> bool:
        return True

    def _skip_to_now(self) -> None:
        self._told_output = self._num_outputs

    def _message(self, after_step: int, after_output: int, num_steps: int) -> str:
        """A message of how things are, and of what has ended after an output."""
        server = self._server
        running = server.cluster.num_running
        instances = [*self._instances()]
        load = {
            "time": round(time.monotonic(), 3),
            "running": running,
            "waiting": server.cluster.num_requests - running,
            "backlog": max((each["queue"] or 0.0 for each in instances), default=0.0),
            "pages": sum(each["pages"] for each in instances),
            "cached": server.index.num_blocks,
            "held": [each["held"] for each in instances],
        }
        pools = {
            name: round(value, 3) if math.isfinite(value) else None
            for name, value in server.conductor.loads(server.now())._asdict().items()
        }
        with self._lock:
            outputs = [one for one in self._outputs if one[0] > after_output]
        ended = [describe_output(number, output) for number, output in outputs]
        message = {"load": load, "steps": [], "skipped": 0, "reading": [], "ended": ended}
        return json.dumps(message | {"instances": instances, "pools": pools}, separators=(",", ":"))

    def _instances(self) -> Iterable[dict[str, Any]]:
        server = self._server
        views = {view.name: view for view in server.conductor.instances(server.now())}
        for each in server.instances:
            view, info = views.get(each.name), each.info
            pages = 0 if info is None or view is None else info.max_total_num_tokens // info.page_size
            yield {
                "name": each.name,
                "role": each.role,
                "state": each.state,
                "reason": each.reason,
                "queue": None if view is None else round(view.queue_seconds, 3),
                "decoding": 0 if view is None else view.decoding,
                "requests": 0 if view is None else view.open_requests,
                "pages": pages,
                "held": 0 if each.load is None else round(each.load.token_usage * pages),
                "blocks": [server.index.blocks(each.name, tier) for tier in TIERS],
            }
