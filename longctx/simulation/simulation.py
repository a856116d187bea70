"""Workloads on any number of instances, in virtual time."""

import math
from collections.abc import Sequence as List
from typing import cast

from longctx.cluster.conductor.conductor import Conductor
from longctx.simulation.cluster.cluster_instance import ClusterInstance
from longctx.simulation.cluster.conductor_run import ConductorRun, Priority
from longctx.simulation.cluster.core import Node
from longctx.simulation.cluster.settings import Change, ClusterSettings
from longctx.simulation.event_loop import EventLoop, Link, Thread
from longctx.simulation.record import Record
from longctx.simulation.run import Progress, Route, RoutedRun, Run, Server
from longctx.simulation.workloads import WorkloadRequest
from longctx.simulation.workloads.request import check_arrivals


def least_prefill_seconds(request: WorkloadRequest, instances: List[Server], now: float) -> Server:
    """The instance whose prompts that it has not computed take least; of equals the first."""
    return min(instances, key=lambda instance: instance.prefill_seconds)


class Simulation:
    """Serves workloads in virtual time, one after another.

    Args:
      instances: with names of their own: `Server`s, such as `Instance`, whose caches stay from run to run; behind a
        conductor `ClusterInstance`s with pages of one size, which begin each run with empty caches.
      route: how requests are placed. None: `least_prefill_seconds`. A function returns the instance that a request
        goes to, of `(request, instances, now)`. A `Conductor` places requests as it does when it serves.
      settings: how a conductor hears of its instances, and how pages move. None: the defaults.
      changes: deaths and the like of instances behind a conductor, in any order.

    Attributes:
      loop: in whose time workloads are served.
      nodes: behind a conductor, the instances of the last run by name.

    Raises:
      TypeError: the instances are not of the kind that the route needs.
      ValueError: there is no instance, or two have one name. Behind a conductor: their pages differ in size, or a
        change names none of them. Without one: there are settings or changes.

    Source:
      Medha, 5.4 (policies, on short requests beside long prompts); Mooncake, sections 3 (the way of a request), 5 and 6
      (the conductor). Vidur simulates engines so.

    Examples:
      >>> import dataclasses, statistics
      >>> from longctx.serving import EngineConfig, ParallelPlan
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> model, plan = MODELS["llama-3-8b"], ParallelPlan(tensor=8)
      >>> config = EngineConfig.medha(num_pages=40_000)
      >>> seconds = predictor(model, "h100-rdma", plan, max_rows=config.token_budget)
      >>> requests = arrive_at_rate(make_mix("sharegpt4-5-long", 60), rate=2.0)
      >>> for policy in ("fcfs", "ilrs"):
      ...     rules = dataclasses.replace(config, policy=policy)
      ...     record = Simulation([Instance(model, rules, seconds, plan)]).run(requests, keep_steps=False)
      ...     print(policy, round(statistics.median(served.ttft for served in record.served), 1))
      fcfs 116.0
      ilrs 0.2

      A cluster, with the conductor that serves:

      >>> from longctx.cluster.conductor.conductor import Conductor
      >>> from longctx.cluster.conductor.config import ConductorConfig
      >>> from longctx.cluster.prefix_index.index import PrefixIndex
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.simulation.deployment import ClusterDeployment
      >>> from longctx.simulation.workloads import Lengths, make_conversations
      >>> instances = ClusterDeployment(model, Topology.preset("h100-rdma"), plan, prefill=4, decode=1).instances()
      >>> turns = make_conversations(40, Lengths(4, 4), Lengths(20_000, 40_000), Lengths(500, 500), Lengths(50, 50))
      >>> for policy in ("random", "kvcache_centric"):
      ...     conductor = Conductor(ConductorConfig(policy=policy), PrefixIndex())
      ...     record = Simulation(instances, conductor).run(arrive_at_rate(turns, rate=1.0))
      ...     mean = statistics.mean(served.ttft for served in record.served)
      ...     print(policy, round(record.hit_rate, 2), round(mean, 3))
      random 0.32 0.203
      kvcache_centric 0.74 0.075
    """

    def __init__(
        self,
        instances: List[Server] | List[ClusterInstance],
        route: Route | Conductor | None = None,
        settings: ClusterSettings | None = None,
        changes: List[Change] = (),
    ) -> None:
        self.instances: list[Server | ClusterInstance] = list(instances)
        names = [instance.name for instance in self.instances]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"instances must be at least one, with names of their own, got {names}")
        self._route = route or least_prefill_seconds
        self._settings, self._changes = settings or ClusterSettings(), list(changes)
        self.loop, self.nodes = EventLoop(), dict[str, Node]()
        specs = [instance for instance in self.instances if isinstance(instance, ClusterInstance)]
        if len(specs) != (len(names) if isinstance(route, Conductor) else 0):
            raise TypeError("instances must be ClusterInstances behind a Conductor, and Servers elsewhere")
        if not specs and (settings is not None or changes):
            raise ValueError("settings and changes are of clusters: route must be a Conductor")
        if len({each.config.page_size for each in specs}) > 1:
            sizes = {each.name: each.config.page_size for each in specs}
            raise ValueError(f"instances must have pages of one size, got {sizes}")
        for change in self._changes:
            if change.instance not in names:
                raise ValueError(f"changes must name instances, {', '.join(names)}; got {change.instance!r}")

    def run(
        self,
        requests: List[WorkloadRequest],
        seed: int = 0,
        until: float = math.inf,
        progress: Progress | None = None,
        keep_steps: bool = True,
        priority: Priority | None = None,
    ) -> Record:
        """Serve requests, which are in order of arrival; every output is as long as asked for.

        Args:
          requests: those that follow another one (`WorkloadRequest.after`) stand anywhere after it.
          seed: of contents that are made up: what is shared is shared whatever the seed.
          until: seconds of the window: what has not ended by then is in `Record.open`.
          progress: is called with the record after every event; the run ends where it returns True.
          keep_steps: whether the record has all steps, and a timeline.
          priority: of a request for a conductor, higher is more urgent; None: all have 0.

        Returns:
          What came of it; behind a conductor a `Record`.

        Raises:
          ValueError: a request can't be served, or comes before the one before it; none is begun then.
        """
        if not until > 0:
            raise ValueError(f"until must be positive seconds, got {until}")
        check_arrivals(requests)
        if isinstance(self._route, Conductor):
            run = self._conductor_run(self._route, requests, seed, keep_steps, priority)
        else:
            if priority is not None:
                raise ValueError("priority is for clusters: route must be a Conductor")
            servers = cast(list[Server], self.instances)
            _check(requests, servers)
            run = RoutedRun(self.loop, servers, self._route, seed, keep_steps)
        return run.serve(requests, until, progress)

    def _conductor_run(
        self,
        conductor: Conductor,
        requests: List[WorkloadRequest],
        seed: int,
        keep_steps: bool,
        priority: Priority | None,
    ) -> Run:
        """Let all instances join the conductor with empty caches; those of the last run leave it."""
        loop, settings, specs = self.loop, self._settings, cast(list[ClusterInstance], self.instances)
        for name, node in self.nodes.items():
            if node.core is not None:
                conductor.remove(name, loop.now)
        cores = {each.core: Link(loop, 1.0) for each in specs if each.core}
        router = Thread([*cores.values()] or [Link(loop, 1.0)])
        given = conductor, loop, seed, settings, keep_steps, cores, router
        self.nodes = {each.name: Node(each, *given) for each in specs}
        for node in self.nodes.values():
            node.join()
        _check(requests, [node.lives[0] for node in self.nodes.values()])
        return ConductorRun(loop, self.nodes, conductor, router, settings, self._changes, seed, priority)


def _check(requests: List[WorkloadRequest], servers: List[Server]) -> None:
    """Check what needs no tokens, before the clock moves."""
    for order, request in enumerate(requests):
        for server in servers:
            try:
                server.check(request)
            except ValueError as error:
                name = f" ({server.name})" if len(servers) > 1 else ""
                raise ValueError(f"requests[{order}] {error}{name}") from None
