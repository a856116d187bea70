"""Settings of a simulated cluster, and changes of its instances."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from longctx.models.validation import check_bool, check_real
from longctx.serving.validation import check_text
from longctx.simulation.cluster.page_stream import OVERLAPS, Overlap

Action = Literal["kill", "join", "drain", "restore", "prefill", "decode", "both"]
"""It dies, with all that it has; comes back, with nothing; gets no more requests; gets some again; its role changes."""
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True)
class ServerTimes:
    """Seconds of a core that a server or a router takes for requests, beside engines.

    Attributes:
      request: for a request that comes.
      prompt_token: for each token of its prompt besides.
      token: to pass on a token of an answer.
      report: for each report of an instance to the conductor.

    Raises:
      TypeError, ValueError: a time is no finite number of at least 0.

    Examples:
      >>> from longctx.simulation.cluster import ServerTimes
      >>> ServerTimes(request=2e-3, prompt_token=1e-6).seconds(4000)
      0.006
    """

    request: float = 0.0
    prompt_token: float = 0.0
    token: float = 0.0
    report: float = 0.0

    def __post_init__(self) -> None:
        for name in ("request", "prompt_token", "token", "report"):
            check_real(name, getattr(self, name), 0)

    def seconds(self, prompt_tokens: int) -> float:
        """Return the seconds that a request takes before an engine has it.

        Args:
          prompt_tokens: of its prompt.

        Returns:
          Seconds of a core.
        """
        return self.request + self.prompt_token * prompt_tokens


@dataclass(frozen=True)
class ClusterSettings:
    """Settings that are no instance's own.

    Attributes:
      overlap: when pages leave for where a request decodes, see `Overlap`.
      report_seconds: between two reports of each instance to the conductor.
      event_seconds: after which the conductor hears what an instance has stored or dropped.
      first_token: which instance draws it. `"prefill"`: a request joins where it decodes when its pages are in that
        host's memory. `"decode"`: full pages come there, and what follows these is computed where it decodes. Either
        way it takes no slot and no page there before.
      call_seconds: from a decision until an instance has the request, for each server that passes it on: the one where
        it decodes asks the one that reads its prompt.
      router: what the router takes for requests, on the core that has the least to do of those that instances share
        (`ClusterInstance.core`), or on one of its own.
      swaps: whether the conductor has instances drop cold blocks before these do it by themselves.
      least_retry: seconds after which a request that is deferred asks again, at least.

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range; the message names it.

    Source:
      Mooncake, 3 (steps 1 to 4) and 4.2 (layer-wise prefill).

    Examples:
      >>> import statistics
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.cluster import ClusterSettings
      >>> from longctx.simulation.deployment import ClusterDeployment
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> sizes = {"prefill": 1, "decode": 1, "bandwidth": 10e9}
      >>> for overlap in ("end", "layer"):  # pages leave when the prompt is computed, or layer by layer before
      ...     deployment = ClusterDeployment(model, topology, plan, settings=ClusterSettings(overlap=overlap), **sizes)
      ...     moved = deployment.simulation().run(arrive_at_rate(make_mix("sharegpt4", 20), rate=1.0)).moved
      ...     print(overlap, round(statistics.mean(each.exposed for each in moved), 4))  # seconds that somebody waited
      end 0.035
      layer 0.0146
    """

    overlap: Overlap = "layer"
    report_seconds: float = 1.0
    event_seconds: float = 0.0
    first_token: Literal["prefill", "decode"] = "prefill"
    call_seconds: float = 0.0
    swaps: bool = False
    least_retry: float = 0.1
    router: ServerTimes = field(default_factory=ServerTimes)

    def __post_init__(self) -> None:
        if self.overlap not in OVERLAPS:
            raise ValueError(f"overlap must be one of {', '.join(OVERLAPS)}, got {self.overlap!r}")
        if self.first_token not in ("prefill", "decode"):
            raise ValueError(f'first_token must be "prefill" or "decode", got {self.first_token!r}')
        check_bool("swaps", self.swaps)
        for name in ("event_seconds", "call_seconds"):
            check_real(name, getattr(self, name), 0)
        for name in ("report_seconds", "least_retry"):
            if not check_real(name, getattr(self, name), 0) > 0:
                raise ValueError(f"{name} must be seconds, more than 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Change:
    """Event of an instance, at a time in seconds after the beginning of the workload.

    Attributes:
      at: seconds from the beginning of the workload.
      instance: its name.
      action: `"kill"` (it dies, with all that it has), `"join"` (it comes back, with nothing), `"drain"` (it gets no
        more requests), `"restore"` (it gets some again), or its new role: `"prefill"`, `"decode"`, `"both"`.

    Raises:
      TypeError, ValueError: the time is negative or not finite, or there is no such action.

    Examples:
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.cluster import Change
      >>> from longctx.simulation.deployment import ClusterDeployment
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> changes = (Change(5.0, "decode-0", "kill"), Change(60.0, "decode-0", "join"))
      >>> deployment = ClusterDeployment(model, topology, plan, prefill=1, decode=2, changes=changes)
      >>> record = deployment.simulation().run(arrive_at_rate(make_mix("sharegpt4", 50), rate=4.0))
      >>> len(record.served), record.num_reassigned  # what it decoded goes on elsewhere
      (50, 1)
    """

    at: float
    instance: str
    action: Action

    def __post_init__(self) -> None:
        check_text("instance", self.instance)
        check_real("at", self.at, 0)
        if self.action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}, got {self.action!r}")
