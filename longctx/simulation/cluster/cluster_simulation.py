"""`ClusterSimulation`: workloads on a cluster in virtual time, placed by the conductor that serves."""

import copy
import math
from collections.abc import Callable
from collections.abc import Sequence as List

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.conductor.instance import Costs
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.serving.scheduler.chunking import Chunking
from longctx.simulation.cluster.changes import Change
from longctx.simulation.cluster.cluster_instance import ClusterInstance
from longctx.simulation.cluster.cluster_record import ClusterRecord
from longctx.simulation.cluster.node import Node
from longctx.simulation.cluster.run import ClusterRun, Priority
from longctx.simulation.cluster.settings import ClusterSettings
from longctx.simulation.event_loop import EventLoop
from longctx.simulation.workloads import WorkloadRequest, check_arrivals


class ClusterSimulation:
    """A cluster: prefill and decode instances, or coupled ones, behind a conductor.

    Every run begins with empty caches.

    Args:
      instances: with names of their own; all with pages of one size.
      config: of the conductor.
      settings: how it hears of its instances, and how pages move.
      changes: deaths and the like, in any order.

    Attributes:
      last: the run that goes on, or the last one; None: there was none.

    Raises:
      ValueError: there is no instance, two have one name, their pages differ in size, or a change names none of them.

    Source:
      Mooncake, sections 3 (the way of a request), 5 and 6 (the conductor).

    Examples:
      >>> import statistics
      >>> from longctx.cluster.conductor.config import ConductorConfig
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.cluster import ClusterDeployment, ClusterSimulation
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import Lengths, arrive_at_rate, make_conversations
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> instances = ClusterDeployment(model, topology, plan, prefill=4, decode=1).instances()
      >>> turns = make_conversations(40, Lengths(4, 4), Lengths(20_000, 40_000), Lengths(500, 500), Lengths(50, 50))
      >>> for policy in ("random", "kvcache_centric"):
      ...     simulation = ClusterSimulation(instances, ConductorConfig(policy=policy))
      ...     record = simulation.run(arrive_at_rate(turns, rate=1.0))
      ...     mean = statistics.mean(served.ttft for served in record.served)
      ...     print(policy, round(record.hit_rate, 2), round(mean, 3))
      random 0.32 0.239
      kvcache_centric 0.74 0.086
    """

    def __init__(
        self,
        instances: List[ClusterInstance],
        config: ConductorConfig | None = None,
        settings: ClusterSettings | None = None,
        changes: List[Change] = (),
    ) -> None:
        self.instances, self.config = list(instances), config or ConductorConfig()
        self.settings, self.changes = settings or ClusterSettings(), list(changes)
        names = [each.name for each in self.instances]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"instances must be at least one, with names of their own, got {names}")
        if len({each.config.page_size for each in self.instances}) > 1:
            sizes = {each.name: each.config.page_size for each in self.instances}
            raise ValueError(f"instances must have pages of one size, got {sizes}")
        for change in self.changes:
            if change.instance not in names:
                raise ValueError(f"changes must name instances, {', '.join(names)}; got {change.instance!r}")
        self._costs = [_costs_of(each) for each in self.instances]
        self._longest = 0
        self.last: ClusterRun | None = None

    def run(
        self,
        requests: List[WorkloadRequest],
        seed: int = 0,
        until: float = math.inf,
        progress: Callable[[ClusterRecord], object] | None = None,
        priority: Priority | None = None,
        keep_steps: bool = False,
    ) -> ClusterRecord:
        """Serve requests, which are in order of arrival; every output is as long as asked for.

        Args:
          requests: in the order of their arrivals.
          seed: of contents that are made up.
          until: seconds of the window: what has not ended by then is in `ClusterRecord.open`.
          progress: is called with the record after every event; the run ends where it returns True.
          priority: of a request, higher is more urgent; None: all have 0.
          keep_steps: whether the record has all steps.

        Returns:
          What came of it.

        Raises:
          ValueError: a request can't be served by some instance that may get it, or comes before the one before it.
        """
        if not until > 0:
            raise ValueError(f"until must be positive seconds, got {until}")
        check_arrivals(requests)
        loop, index = EventLoop(), PrefixIndex()
        config = copy.deepcopy(self.config)  # a policy of one's own may remember things
        conductor = Conductor(config, index)
        nodes: dict[str, Node] = {}
        for spec, costs in zip(self.instances, self._costs, strict=True):
            nodes[spec.name] = Node(spec, costs, loop, index, seed, self.settings, keep_steps)
            nodes[spec.name].join(conductor)
        self._check(requests, nodes)
        self.last = run = ClusterRun(nodes, loop, conductor, self.settings, seed, priority)
        return run.run(requests, self.changes, until, progress)

    def _check(self, requests: List[WorkloadRequest], nodes: dict[str, Node]) -> None:
        """ValueError if a request is longer than what some instance can hold."""
        for order, request in enumerate(requests):
            if request.length <= self._longest:
                continue
            for node in nodes.values():
                assert node.core is not None
                try:
                    node.core.check(request)
                except ValueError as error:
                    raise ValueError(f"requests[{order}] {error} ({node.spec.name})") from None
            self._longest = request.length


def _costs_of(instance: ClusterInstance) -> Costs:
    config, plan = instance.config, instance.plan
    chunking = Chunking.parse(config.chunking, config.token_budget, config.max_running)
    return PredictorCosts.of_model(instance.predictor, instance.model, chunking.tokens, plan, kv_dtype=config.kv_dtype)
