"""What happens to instances of a simulated cluster at given times."""

from dataclasses import dataclass
from typing import Literal, get_args

from longctx.serving.validation import check_real, check_text

Action = Literal["kill", "join", "drain", "restore", "prefill", "decode", "both"]
"""It dies, with all that it has; comes back, with nothing; gets no more requests; gets some again; its role changes."""
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True)
class Change:
    """Something that happens to an instance, so many seconds after the beginning of the workload.

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
      >>> from longctx.simulation.cluster import Change, ClusterDeployment
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> changes = (Change(5.0, "decode-0", "kill"), Change(60.0, "decode-0", "join"))
      >>> deployment = ClusterDeployment(model, topology, plan, prefill=1, decode=2, changes=changes)
      >>> record = deployment.run(arrive_at_rate(make_mix("sharegpt4", 50), rate=4.0))
      >>> len(record.served), record.num_reassigned  # what it decoded goes on elsewhere
      (50, 2)
    """

    at: float
    instance: str
    action: Action

    def __post_init__(self) -> None:
        check_text("instance", self.instance)
        check_real("at", self.at, 0)
        if self.action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}, got {self.action!r}")
