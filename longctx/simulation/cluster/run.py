"""`ClusterRun`: one workload on a simulated cluster."""

from collections.abc import Callable
from collections.abc import Sequence as List

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.instance import Role
from longctx.serving.kv_cache.page_pool import Key
from longctx.simulation.cluster.active_request import ActiveRequest
from longctx.simulation.cluster.changes import Change
from longctx.simulation.cluster.cluster_record import ClusterRecord, LoadPoint, Placed, Rejected, RoleAt
from longctx.simulation.cluster.core import ClusterCore
from longctx.simulation.cluster.node import Node
from longctx.simulation.cluster.settings import ClusterSettings
from longctx.simulation.event_loop import EventLoop
from longctx.simulation.instance.tokenless import PageKeys
from longctx.simulation.record import InstanceRecord, Open, Served, sum_stats
from longctx.simulation.workloads import WorkloadRequest

Priority = Callable[[WorkloadRequest], int]


class ClusterRun:
    """The events of one workload.

    Attributes:
      nodes: the instances, by name.
      start: of the workload, by the loop.
    """

    def __init__(
        self,
        nodes: dict[str, Node],
        loop: EventLoop,
        conductor: Conductor,
        settings: ClusterSettings,
        seed: int,
        priority: Priority | None,
    ) -> None:
        self.nodes, self.loop, self.conductor = nodes, loop, conductor
        self.settings, self._seed, self._priority = settings, seed, priority
        self.record, self.start = ClusterRecord(), loop.now
        self._active: dict[str, ActiveRequest] = {}
        self._stranded: list[ActiveRequest] = []
        self._followers: dict[int, list[tuple[int, WorkloadRequest]]] = {}
        self._last_end = loop.now
        self._num_coming = 0  # requests and changes that are planned
        self._page_size = next(iter(nodes.values())).spec.config.page_size

    def run(
        self,
        requests: List[WorkloadRequest],
        changes: List[Change],
        until: float,
        progress: Callable[[ClusterRecord], object] | None,
    ) -> ClusterRecord:
        """Let all happen; requests are in order of arrival."""
        loop, record = self.loop, self.record
        for change in changes:
            self._plan(change.at, lambda change=change: self._change(change))  # type: ignore[misc]
        for order, request in enumerate(requests):
            if request.after is None:
                self._plan_arrival(order, request, request.arrival)
            else:
                self._followers.setdefault(request.after, []).append((order, request))
        self._tick()

        def after() -> None:
            if progress is not None and progress(record) is True:
                loop.clear()

        loop.run(self.start + until, None if progress is None else after)
        record.seconds = (loop.now if self._active else self._last_end) - self.start
        for request_id in list(self._active):
            active = self._active[request_id]
            active.abort()
            ttft = None if active.metrics.first_token is None else active.metrics.first_token - self.start - active.due
            record.open.append(Open(active.due, active.metrics, ttft, active.request.number))
        for node in self.nodes.values():
            for core in node.lives:
                stats = core.stats
                record.instances.append(InstanceRecord(core.name, core.num_devices, core.totals, core.steps, stats))
        record.stats = sum_stats([each.stats for each in record.instances if each.stats is not None])
        return record

    # What requests and their legs ask.

    def core(self, name: str) -> ClusterCore:
        """The core of an instance that lives."""
        core = self.nodes[name].core
        assert core is not None, f"{name} is dead"
        return core

    def wait_for_instance(self, active: ActiveRequest) -> None:
        """It is assigned when an instance comes."""
        self._stranded.append(active)

    def end_served(self, active: ActiveRequest, placed: Placed) -> None:
        """It has all its tokens."""
        config, metrics = self.conductor.config, active.metrics
        metrics.ttft_deadline, metrics.tpot_target = config.ttft, config.tpot
        self.conductor.finished(active.request_id, self.loop.now)
        name = placed.assignment.decode
        self.record.served.append(Served.of(metrics, active.due, self.start, active.request.number, name))
        self.record.placed.append(placed)
        self._end(active)

    def end_rejected(self, active: ActiveRequest, rejected: Rejected) -> None:
        """It is not served."""
        self.record.rejected.append(rejected)
        self._end(active)

    def _end(self, active: ActiveRequest) -> None:
        del self._active[active.request_id]
        self._last_end = self.loop.now
        for order, follower in self._followers.get(active.request.number, ()):
            self._plan_arrival(order, follower, max(follower.arrival, self.loop.now - self.start + follower.delay))

    # Events.

    def _plan(self, at: float, action: Callable[[], object]) -> None:
        self._num_coming += 1

        def act() -> None:
            self._num_coming -= 1
            action()

        self.loop.at(self.start + at, act)

    def _plan_arrival(self, order: int, request: WorkloadRequest, due: float) -> None:
        self._plan(due, lambda: self._arrive(order, request, due))

    def _arrive(self, order: int, request: WorkloadRequest, due: float) -> None:
        keys: list[Key] = []
        PageKeys(request, self._page_size, self._seed).extend(keys, request.prompt_tokens)
        priority = 0 if self._priority is None else self._priority(request)
        active = ActiveRequest(self, request, f"request-{order}", due, keys, priority)
        self._active[active.request_id] = active
        active.assign()

    def _change(self, change: Change) -> None:
        node, conductor, now = self.nodes[change.instance], self.conductor, self.loop.now
        match change.action:
            case "kill" if node.core is not None:
                self._kill(node)
            case "join" if node.core is None:
                node.join(conductor)
            case "drain" if node.core is not None:
                conductor.drain(change.instance, now)
            case "restore" if node.core is not None:
                conductor.restore(change.instance, now)
            case "prefill" | "decode" | "both":
                self._set_role(node, change.action)
            case _:
                return  # it is so already
        stranded, self._stranded = self._stranded, []
        for active in stranded:
            active.assign()

    def _set_role(self, node: Node, role: Role) -> None:
        node.role = role
        self.record.roles.append(RoleAt(self.loop.now - self.start, node.spec.name, role))
        if node.core is not None:
            self.conductor.set_role(node.spec.name, role, self.loop.now)

    def _kill(self, node: Node) -> None:
        name, conductor, now = node.spec.name, self.conductor, self.loop.now
        lost = [a for a in self._active.values() if a.attempt is not None and a.attempt.needs(name)]
        for active in lost:
            active.abort()
        node.kill()
        removed = set(conductor.remove(name, now))
        for active in lost:
            if active.request_id not in removed:  # it decodes already, by the conductor, but its pages had not left
                conductor.cancelled(active.request_id, now)
        self.record.num_reassigned += len(lost)
        for active in lost:
            active.assign()

    def _tick(self) -> None:
        """Instances report, and the loads are noted, as long as anything can happen."""
        now = self.loop.now
        for node in self.nodes.values():
            node.report(self.conductor)
        loads = self.conductor.loads(now)
        self.record.loads.append(LoadPoint(now - self.start, loads.prefill, loads.decode))
        change = self.conductor.role_change(now)
        if change is not None:
            self._set_role(self.nodes[change.instance], change.role)
        if self.settings.swaps:
            for swap in self.conductor.swaps(now):
                self.nodes[swap.instance].swap_out(swap.keys)
        if self._num_coming or len(self._active) > len(self._stranded):
            self.loop.at(now + self.settings.report_seconds, self._tick)
