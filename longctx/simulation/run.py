"""One workload in virtual time: requests come, are served on instances, and leave a record."""

from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

from longctx.serving.request.output import Metrics
from longctx.simulation.event_loop import EventLoop
from longctx.simulation.record import InstanceRecord, Open, Record, Served, merge_timelines, sum_stats
from longctx.simulation.server import Server
from longctx.simulation.workloads import WorkloadRequest

Route = Callable[[WorkloadRequest, List[Server], float], Server]
Progress = Callable[[Any], object]  # of the record


class Run:
    """Base of the runs of a workload: those that a function routes, and those that a conductor routes.

    Attributes:
      record: the results so far.
      start: when the workload began, in seconds of the loop.
    """

    record: Record

    def __init__(self, loop: EventLoop) -> None:
        self.loop, self.start = loop, loop.now
        self._followers: dict[int, list[tuple[int, WorkloadRequest]]] = {}

    def serve(self, requests: List[WorkloadRequest], until: float, progress: Progress | None) -> Record:
        """Serve requests, which are in order of arrival, until the window closes."""
        loop, record = self.loop, self.record
        try:
            for order, request in enumerate(requests):
                if request.after is None:
                    self._plan_arrival(order, request, request.arrival)
                else:
                    self._followers.setdefault(request.after, []).append((order, request))
            self._begin()

            def after() -> None:
                if progress is not None and progress(record) is True:
                    loop.clear()

            loop.run(self.start + until, None if progress is None else after)
            self._finish()
        finally:
            self._stop()
            loop.clear()  # including what instances planned while they stopped
        record.open.sort(key=lambda each: each.due)
        record.stats = sum_stats([each.stats for each in record.instances if each.stats is not None])
        return record

    def _begin(self) -> None:
        """Begin what goes on beside requests."""

    def _arrive(self, order: int, request: WorkloadRequest, due: float) -> None:
        """Let a request enter that was due at `due`."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Complete the record when the window has closed."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop what still runs."""

    def _plan(self, at: float, action: Callable[[], object]) -> None:
        """Plan what happens some seconds after the start."""
        self.loop.at(self.start + at, action)

    def _plan_arrival(self, order: int, request: WorkloadRequest, due: float) -> None:
        self._plan(due, lambda: self._arrive(order, request, due))

    def _plan_followers(self, request: WorkloadRequest) -> None:
        """Plan the arrivals of requests that follow one which has ended."""
        for order, follower in self._followers.get(request.number, ()):
            self._plan_arrival(order, follower, max(follower.arrival, self.loop.now - self.start + follower.delay))

    def _note_instances(self, servers: List[Server]) -> None:
        """Record what instances have computed."""
        record = self.record
        for each in servers:
            record.instances.append(InstanceRecord(each.name, each.num_devices, each.totals, each.steps, each.stats))
        if len(servers) == 1:
            record.steps = record.instances[0].steps
        else:
            steps = [step for instance in record.instances for step in instance.steps]
            record.steps = sorted(steps, key=lambda step: step.finished)
        timeline = merge_timelines([each.timeline for each in servers])
        record.timeline = [(at - self.start, running, waiting) for at, running, waiting in timeline]

    def _note_open(self, due: float, metrics: Metrics, number: int, instance: str = "") -> None:
        ttft = None if metrics.first_token is None else metrics.first_token - self.start - due
        self.record.open.append(Open(due, metrics, ttft, number, instance))


class RoutedRun(Run):
    """A workload whose requests a function routes."""

    def __init__(self, loop: EventLoop, instances: List[Server], route: Route, seed: int, keep_steps: bool) -> None:
        super().__init__(loop)
        self._instances, self._route, self.record = instances, route, Record()
        for instance in instances:
            instance.keep_steps = keep_steps
            instance.attach(loop, self._on_end(instance), seed)

    def _arrive(self, order: int, request: WorkloadRequest, due: float) -> None:
        now, instances = self.loop.now, self._instances
        instance = instances[0] if len(instances) == 1 else self._route(request, instances, now)
        instance.add(request, now)

    def _on_end(self, instance: Server) -> Callable[[WorkloadRequest, Metrics], None]:
        """Return what is called when a request has ended on an instance."""

        def on_end(request: WorkloadRequest, metrics: Metrics) -> None:
            due = request.arrival if request.after is None else metrics.arrival - self.start
            self.record.served.append(Served.of(metrics, due, self.start, request.number, instance.name))
            self._plan_followers(request)

        return on_end

    def _finish(self) -> None:
        self.record.seconds = self.loop.now - self.start
        self._note_instances(self._instances)

    def _stop(self) -> None:
        for instance in self._instances:
            for request, metrics in instance.stop():
                self._note_open(metrics.arrival - self.start, metrics, request.number, instance.name)
