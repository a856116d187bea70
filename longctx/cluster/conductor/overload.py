"""Which requests are rejected by load."""

from typing import NamedTuple

from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.decision import Assignment, Bound
from longctx.cluster.conductor.request import ClusterRequest
from longctx.cluster.conductor.state import ClusterState, OpenRequest


class Verdict(NamedTuple):
    """Why a request is rejected.

    Attributes:
      load: of the pool that binds: predicted time over its SLO.
      retry_after: seconds after which it may be accepted, by prediction.
    """

    bound: Bound
    load: float
    retry_after: float


class Admission:
    """The rule of `ConductorConfig.admission`."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config

    def before_prefill(
        self, state: ClusterState, request: ClusterRequest, placed: Assignment, now: float
    ) -> Verdict | None:
        """Check a request when it comes."""
        if self._config.admission == "none":
            return None
        ttft, tpot = request.ttft or self._config.ttft, request.tpot or self._config.tpot
        if placed.ttft > ttft:
            return Verdict("ttft", placed.ttft / ttft, placed.ttft - ttft)
        if self._config.admission != "baseline" and placed.tbt > tpot:
            return Verdict("tbt", placed.tbt / tpot, tpot)
        return None

    def before_decode(self, state: ClusterState, open_request: OpenRequest, now: float) -> Verdict | None:
        """Check a request whose prompt is computed."""
        if self._config.admission != "baseline":
            return None
        tpot = open_request.request.tpot or self._config.tpot
        decode = state.instances[open_request.assignment.decode]
        tbt = decode.tbt(decode.decoding.plus(open_request))
        return Verdict("tbt", tbt / tpot, tpot) if tbt > tpot else None

    def learn(self, seconds: float) -> None:
        """A request has decoded for so long."""

    def retry_seconds(self, state: ClusterState, bound: Bound, request: ClusterRequest, now: float) -> float:
        """Seconds after which a request may be accepted."""
        return 1.0
