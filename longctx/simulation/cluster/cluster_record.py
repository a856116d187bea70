"""Results of a workload on a cluster."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from longctx.cluster.conductor.config import Role
from longctx.cluster.conductor.request import Assignment, Bound
from longctx.simulation.record import Record, Served


class Placed(NamedTuple):
    """Place where a request was served, and the prediction.

    Attributes:
      assignment: the last one: names of instances, and predicted seconds.
      num_assigned: how often it was assigned, in all: more than once after failures.
      tbt: mean of the longest tenth of the gaps between its tokens, seconds (Mooncake, FAST'25, 5.1); None: it had one
        token.
    """

    assignment: Assignment
    num_assigned: int
    tbt: float | None


class Rejected(NamedTuple):
    """A request that was not served, see `longctx.cluster.conductor.request.Rejection`.

    Attributes:
      due: when it came, seconds from the beginning of the workload. at: when it was rejected.
      deferred: how often it was told to come again before.
      ttft, tbt: predicted seconds, had it been accepted.
    """

    number: int
    due: float
    at: float
    stage: Literal["prefill", "decode"]
    bound: Bound
    ttft: float
    tbt: float
    load: float
    prompt_tokens: int
    deferred: int = 0


class Moved(NamedTuple):
    """Pages that went from one instance to another.

    Attributes:
      kind: `"prefix"`: of a prefix, to where a prompt is computed; `"pages"`: of a whole prompt, to where it decodes.
      begun, ended: seconds from the beginning of the workload.
      exposed: seconds that somebody waited for them: of `"pages"`, since the prompt had been computed.
    """

    number: int
    kind: Literal["prefix", "pages"]
    source: str
    target: str
    num_bytes: float
    begun: float
    ended: float
    exposed: float


class LoadPoint(NamedTuple):
    """The load of both pools at a time: predicted TTFT and TBT over their SLOs (Mooncake, 6.1)."""

    at: float
    prefill: float
    decode: float


class RoleAt(NamedTuple):
    """An instance has another role from a time on."""

    at: float
    instance: str
    role: Role


@dataclass
class ClusterRecord(Record):
    """A `Record`, and what only clusters have. Times are seconds from the beginning of the workload.

    Attributes:
      placed: of each request in `served`, in the same order.
      rejected: in the order of rejections.
      loads: at every report.
      moved: in the order in which they ended.
      roles: changes of roles.
      num_deferred: how often a request was told to come again.
      num_reassigned: how often a request was assigned anew, as an instance died.

    Source:
      Mooncake, 2 (goodput: only completed requests count) and 6 (loads).

    Examples:
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.cluster import ClusterDeployment
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import Lengths, arrive_at_rate, make_conversations
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> turns = make_conversations(40, Lengths(4, 4), Lengths(20_000, 40_000), Lengths(500, 500), Lengths(50, 50))
      >>> record = ClusterDeployment(model, topology, plan, prefill=1, decode=1).run(arrive_at_rate(turns, rate=3.0))
      >>> len(record.served), len(record.goodput(ttft=0.5, tpot=0.05)), round(record.hit_rate, 2)
      (160, 79, 0.74)
    """

    placed: list[Placed] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    loads: list[LoadPoint] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    roles: list[RoleAt] = field(default_factory=list)
    num_deferred: int = 0
    num_reassigned: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens of prompts whose keys and values were found, of requests that were served."""
        return sum(each.metrics.cached_tokens for each in self.served)

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that were found, of requests that were served."""
        return self.hit_tokens / max(1, sum(each.metrics.prompt_tokens for each in self.served))

    def goodput(self, ttft: float, tpot: float) -> list[Served]:
        """Return the requests that completed within both SLOs.

        Args:
          ttft, tpot: SLOs, in seconds.

        Source:
          Mooncake, 2: only completed requests count.
        """
        return [each for each in self.served if each.ttft <= ttft and (each.tpot is None or each.tpot <= tpot)]
