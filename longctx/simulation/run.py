"""One workload in virtual time: requests come, are served on `Server`s, and leave a record."""

from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Protocol, runtime_checkable

from longctx.serving.engine.metrics import EngineStats, StepMetrics
from longctx.serving.request.output import Metrics
from longctx.simulation.event_loop import EventLoop
from longctx.simulation.record import InstanceRecord, Open, Record, Served, Totals, merge_timelines, sum_stats
from longctx.simulation.workloads import WorkloadRequest

OnEnd = Callable[[WorkloadRequest, Metrics], object]


@runtime_checkable
class Server(Protocol):
    """A system that requests are simulated on: an `Instance`, or one with a scheduler of its own.

    Attributes:
      name: that no other one of a simulation has.
      num_devices: GPUs.
      keep_steps: whether `steps` and `timeline` are wanted; set before `attach`.
      steps, timeline, totals, stats: see `Record`. Times are those of the loop.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import Lengths, synthesize
      >>> model, config = LlamaConfig.preset("llama-3-8b"), EngineConfig(num_pages=2000)
      >>> seconds = predictor(model, "h100-nvlink", max_rows=config.token_budget)
      >>> instances = [Instance(model, config, seconds, name=name) for name in ("a", "b")]
      >>> def route(request, servers, now):  # of `Server`s
      ...     return servers[request.number % len(servers)]
      >>> record = Simulation(instances, route).run(synthesize(4, Lengths(100, 100), Lengths(10, 10)))
      >>> sorted((served.number, served.instance) for served in record.served)
      [(0, 'a'), (1, 'b'), (2, 'a'), (3, 'b')]
    """

    name: str
    num_devices: int
    keep_steps: bool

    @property
    def steps(self) -> list[StepMetrics]:
        """Steps of the run, see `Record`."""

    @property
    def timeline(self) -> list[tuple[float, int, int]]:
        """(seconds, running, waiting) after each step, see `Record`."""

    @property
    def totals(self) -> Totals:
        """Sums over what it has computed in the run."""

    @property
    def stats(self) -> EngineStats | None:
        """Counts since it was made; None before its first step, and of a baseline that is no core of ours."""

    @property
    def prefill_seconds(self) -> float:
        """Predicted seconds of all prompts that it has not computed, by which requests are routed."""

    def attach(self, loop: EventLoop, on_end: OnEnd, seed: int = 0) -> None:
        """Begin a run: plan events in a loop, and tell of each request that has ended, at `loop.now`.

        Records of the run before are dropped.

        Args:
          loop: in whose time it runs.
          on_end: is called with each request that has ended, and its metrics.
          seed: of contents that are made up.
        """

    def check(self, request: WorkloadRequest) -> None:
        """Check a request.

        Raises:
          ValueError: it can never be served.
        """

    def add(self, request: WorkloadRequest, arrival: float) -> None:
        """A request comes at `loop.now`; it was due at `arrival`."""

    def stop(self) -> list[tuple[WorkloadRequest, Metrics]]:
        """End the run.

        Returns:
          The requests that have not ended, and their metrics so far.
        """


Route = Callable[[WorkloadRequest, List[Server], float], Server]
Progress = Callable[[Record], object]


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
