"""What a client is told that is not served now: when its first token would have come, and what forbids it."""

import math

from longctx.cluster.conductor.request import Bound, Rejection
from longctx.serving.server.errors import DROPPED, ApiError

_LEAST, _MOST = 0.5, 120.0  # seconds after which a client may come again
_REASONS: dict[Bound, str] = {
    "ttft": "the first token would come too late",
    "tbt": "tokens would come too slowly",
    "memory": "no instance has room for its keys and values",
    "prefill_load": "the instances that read prompts have too much to do",
    "decode_load": "the instances that write answers have too much to do",
    "no_instance": "there is no instance for it",
}


def rejected(rejection: Rejection) -> ApiError:
    """429, or 503 if nobody is there."""
    reason = _REASONS.get(rejection.bound, rejection.bound)
    parts = [f"the cluster takes no such request now: {reason}"]
    if math.isfinite(rejection.ttft):
        parts.append(f"the first token would come after {rejection.ttft:.2f} s")
    if math.isfinite(rejection.tbt):
        parts.append(f"each later one after {rejection.tbt:.3f} s")
    if math.isfinite(rejection.load):
        parts.append(f"the load is {rejection.load:.2f} of what the SLO allows")
    if rejection.stage == "decode":
        parts.append("its prompt was read in vain")
    if math.isinf(rejection.retry_after) and rejection.bound != "no_instance":
        error = refused(rejection.bound, "; ".join(parts), None)
        error.headers["x-should-retry"] = "false"  # never, as far as is known
        return error
    return refused(rejection.bound, "; ".join(parts), min(max(rejection.retry_after, _LEAST), _MOST))


def refused(bound: str, message: str, retry_after: float | None = 1.0) -> ApiError:
    """The answer to a request that could be served at another time."""
    headers = {DROPPED: bound}
    if bound in ("no_instance", "instances_failed", "draining"):
        return ApiError(503, message, None, "server_is_overloaded", retry_after, headers)
    return ApiError(429, message, None, "slow_down", retry_after, headers)
