"""One workload on a simulated cluster, whose requests the conductor that serves places."""

from collections.abc import Callable
from collections.abc import Sequence as List

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import Role
from longctx.serving.kv_cache.page_pool import Key
from longctx.simulation.cluster.core import Node
from longctx.simulation.cluster.dispatch import ActiveRequest, Cluster
from longctx.simulation.cluster.settings import Change, ClusterSettings
from longctx.simulation.event_loop import EventLoop, Thread
from longctx.simulation.instance.tokenless import PageKeys
from longctx.simulation.record import LoadPoint, Record, RoleAt
from longctx.simulation.run import Run
from longctx.simulation.workloads import WorkloadRequest

Priority = Callable[[WorkloadRequest], int]


class ConductorRun(Run):
    """A workload whose requests a conductor places.

    Args:
      nodes: the instances, by name; they have joined.
      router: its thread.
      priority: of a request, higher is more urgent; None: all have 0.
    """

    def __init__(
        self,
        loop: EventLoop,
        nodes: dict[str, Node],
        conductor: Conductor,
        router: Thread,
        settings: ClusterSettings,
        changes: List[Change],
        seed: int,
        priority: Priority | None,
    ) -> None:
        super().__init__(loop)
        self.record = Record()
        self._cluster = Cluster(nodes, loop, conductor, router, settings, self.record, loop.now, self._end)
        self._seed, self._priority = seed, priority
        self._active: dict[str, ActiveRequest] = {}
        self._last_end = loop.now
        self._num_planned = 0  # requests and changes to come
        self._page_size = next(iter(nodes.values())).spec.config.page_size
        for change in changes:
            self._plan(change.at, lambda change=change: self._change(change))  # type: ignore[misc]

    def _begin(self) -> None:
        self._tick()

    def _arrive(self, order: int, request: WorkloadRequest, due: float) -> None:
        keys: list[Key] = []
        PageKeys(request, self._page_size, self._seed).extend(keys, request.prompt_tokens)
        priority = 0 if self._priority is None else self._priority(request)
        active = ActiveRequest(self._cluster, request, f"request-{order}", due, keys, priority)
        self._active[active.request_id] = active
        seconds = self._cluster.settings.router.seconds(request.prompt_tokens)
        if seconds:
            self._cluster.router.run(seconds, active.assign)
        else:
            active.assign()

    def _finish(self) -> None:
        self.record.seconds = (self.loop.now if self._active else self._last_end) - self.start
        for active in self._active.values():
            active.abort()
            self._note_open(active.due, active.metrics, active.request.number)
        self._note_instances([core for node in self._cluster.nodes.values() for core in node.lives])

    def _end(self, active: ActiveRequest) -> None:
        del self._active[active.request_id]
        self._last_end = self.loop.now
        self._plan_followers(active.request)

    def _plan(self, at: float, action: Callable[[], object]) -> None:
        self._num_planned += 1

        def act() -> None:
            self._num_planned -= 1
            action()

        super()._plan(at, act)

    def _change(self, change: Change) -> None:
        cluster, now = self._cluster, self.loop.now
        node, conductor = cluster.nodes[change.instance], cluster.conductor
        match change.action:
            case "kill" if node.core is not None:
                self._kill(node)
            case "join" if node.core is None:
                node.join()
            case "drain" if node.core is not None:
                conductor.drain(change.instance, now)
            case "restore" if node.core is not None:
                conductor.drain(change.instance, now, False)
            case "prefill" | "decode" | "both":
                self._set_role(node, change.action)
            case _:
                return  # it is so already
        stranded, cluster.stranded = cluster.stranded, []
        for active in stranded:
            active.assign()

    def _set_role(self, node: Node, role: Role) -> None:
        node.role = role
        self.record.roles.append(RoleAt(self.loop.now - self.start, node.spec.name, role))
        if node.core is not None:
            self._cluster.conductor.set_role(node.spec.name, role, self.loop.now)

    def _kill(self, node: Node) -> None:
        name, conductor, now = node.spec.name, self._cluster.conductor, self.loop.now
        lost = [a for a in self._active.values() if a.dispatch is not None and a.dispatch.needs(name)]
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
        """Let instances report, and note the loads, as long as anything can happen."""
        cluster, now = self._cluster, self.loop.now
        conductor, nodes, settings = cluster.conductor, cluster.nodes, cluster.settings
        for node in nodes.values():
            node.report()
        loads = conductor.loads(now)
        self.record.loads.append(LoadPoint(now - self.start, loads.prefill, loads.decode))
        change = conductor.role_change(now)
        if change is not None:
            self._set_role(nodes[change.instance], change.role)
        if settings.swaps:
            for swap in conductor.swaps(now):
                nodes[swap.instance].swap_out(swap.keys)
        if self._num_planned or len(self._active) > len(cluster.stranded):
            self.loop.at(now + settings.report_seconds, self._tick)
