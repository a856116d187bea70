"""Workloads on any number of instances, in virtual time."""

import math
from collections.abc import Callable
from collections.abc import Sequence as List

from longctx.serving.request.output import Metrics
from longctx.simulation.event_loop import EventLoop
from longctx.simulation.record import InstanceRecord, Open, Record, Served, merge_timelines, sum_stats
from longctx.simulation.server import Server
from longctx.simulation.workloads import WorkloadRequest, check_arrivals

Route = Callable[[WorkloadRequest, List[Server], float], Server]


def least_prefill_seconds(request: WorkloadRequest, instances: List[Server], now: float) -> Server:
    """The instance whose prompts that it has not computed take least; of equals the first."""
    return min(instances, key=lambda instance: instance.prefill_seconds)


class Simulation:
    """Serves workloads in virtual time, one after another.

    Args:
      instances: with names of their own.
      route: says which instance a request goes to, of `(request, instances, now)`. None: `least_prefill_seconds`.

    Raises:
      ValueError: there is no instance, or two have one name.

    Source:
      Medha, 5.4 (policies, on short requests beside long prompts); Vidur simulates engines so.

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
      fcfs 144.2
      ilrs 0.3
    """

    def __init__(self, instances: List[Server], route: Route | None = None) -> None:
        self.instances = list(instances)
        names = [instance.name for instance in self.instances]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"instances must be at least one, with names of their own, got {names}")
        self._route = route or least_prefill_seconds
        self.loop = EventLoop()

    def run(
        self,
        requests: List[WorkloadRequest],
        seed: int = 0,
        until: float = math.inf,
        progress: Callable[[Record], object] | None = None,
        keep_steps: bool = True,
    ) -> Record:
        """Serve requests, which are in order of arrival; every output is as long as asked for.

        Args:
          requests: those that follow another one (`WorkloadRequest.after`) stand anywhere after it.
          seed: of contents that are made up: what is shared is shared whatever the seed.
          until: seconds of the window: what has not ended by then is in `Record.open`.
          progress: is called with the record after every event.
          keep_steps: whether the record has all steps, and a timeline.

        Returns:
          What came of it.

        Raises:
          ValueError: a request can't be served, or comes before the one before it; none is begun then.
        """
        if not until > 0:
            raise ValueError(f"until must be positive seconds, got {until}")
        self._check(requests)
        return _Run(self.instances, self._route, self.loop, requests, seed, keep_steps).run(until, progress)

    def _check(self, requests: List[WorkloadRequest]) -> None:
        """Check what needs no tokens, before the clock moves."""
        check_arrivals(requests)
        for order, request in enumerate(requests):
            for instance in self.instances:
                try:
                    instance.check(request)
                except ValueError as error:
                    raise ValueError(f"requests[{order}] {error}") from None


class _Run:
    """One workload."""

    def __init__(
        self,
        instances: List[Server],
        route: Route,
        loop: EventLoop,
        requests: List[WorkloadRequest],
        seed: int,
        keep_steps: bool,
    ) -> None:
        self._instances, self._route, self._loop, self._start = instances, route, loop, loop.now
        self._record, self._followers = Record(), dict[int, list[WorkloadRequest]]()
        for instance in instances:
            instance.keep_steps = keep_steps
            instance.attach(loop, self._on_end(instance), seed)
        for request in requests:
            if request.after is None:
                self._arrive_at(request, request.arrival)
            else:
                self._followers.setdefault(request.after, []).append(request)

    def run(self, until: float, progress: Callable[[Record], object] | None) -> Record:
        record, loop, left = self._record, self._loop, []
        try:
            loop.run(self._start + until, None if progress is None else lambda: progress(record))
            record.seconds = loop.now - self._start
            for instance in self._instances:
                name, devices, steps = instance.name, instance.num_devices, instance.steps
                record.instances.append(InstanceRecord(name, devices, instance.totals, steps, instance.stats))
        finally:
            for instance in self._instances:
                left += [(instance.name, *each) for each in instance.stop()]
            loop.clear()  # of what instances have planned while they stopped, too
        for name, request, metrics in left:
            due = metrics.arrival - self._start
            ttft = None if metrics.first_token is None else metrics.first_token - metrics.arrival
            record.open.append(Open(due, metrics, ttft, request.number, name))
        record.open.sort(key=lambda each: each.due)
        record.stats = sum_stats([each.stats for each in record.instances if each.stats is not None])
        self._add_steps()
        return record

    def _add_steps(self) -> None:
        record = self._record
        if len(record.instances) == 1:
            record.steps = record.instances[0].steps
        else:
            steps = [step for instance in record.instances for step in instance.steps]
            record.steps = sorted(steps, key=lambda step: step.finished)
        timeline = merge_timelines([instance.timeline for instance in self._instances])
        record.timeline = [(at - self._start, running, waiting) for at, running, waiting in timeline]

    def _arrive_at(self, request: WorkloadRequest, due: float) -> None:
        self._loop.at(self._start + due, lambda: self._arrive(request))

    def _arrive(self, request: WorkloadRequest) -> None:
        now, instances = self._loop.now, self._instances
        instance = instances[0] if len(instances) == 1 else self._route(request, instances, now)
        instance.add(request, now)

    def _on_end(self, instance: Server) -> Callable[[WorkloadRequest, Metrics], None]:
        """Return the callback for requests that have ended on an instance."""

        def on_end(request: WorkloadRequest, metrics: Metrics) -> None:
            start = self._start
            due = request.arrival if request.after is None else metrics.arrival - start
            self._record.served.append(Served.of(metrics, due, start, request.number, instance.name))
            for follower in self._followers.get(request.number, ()):
                self._arrive_at(follower, max(follower.arrival, self._loop.now - start + follower.delay))

        return on_end
