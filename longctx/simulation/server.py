"""Protocol of a system that requests are simulated on."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from longctx.serving.engine.metrics import EngineStats, StepMetrics
from longctx.serving.request.output import Metrics
from longctx.simulation.event_loop import EventLoop
from longctx.simulation.record import Totals
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
        ...

    @property
    def timeline(self) -> list[tuple[float, int, int]]:
        """(seconds, running, waiting) after each step, see `Record`."""
        ...

    @property
    def totals(self) -> Totals:
        """Sums over what it has computed in the run."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """Counts since it was made; None before its first step, and of a baseline that is no core of ours."""
        ...

    @property
    def prefill_seconds(self) -> float:
        """Predicted seconds of all prompts that it has not computed, by which requests are routed."""
        ...

    def attach(self, loop: EventLoop, on_end: OnEnd, seed: int = 0) -> None:
        """Begin a run: plan events in a loop, and tell of each request that has ended, at `loop.now`.

        Records of the run before are dropped.

        Args:
          loop: in whose time it runs.
          on_end: is called with each request that has ended, and its metrics.
          seed: of contents that are made up.
        """
        ...

    def check(self, request: WorkloadRequest) -> None:
        """Check a request.

        Raises:
          ValueError: it can never be served.
        """
        ...

    def add(self, request: WorkloadRequest, arrival: float) -> None:
        """A request comes at `loop.now`; it was due at `arrival`."""
        ...

    def stop(self) -> list[tuple[WorkloadRequest, Metrics]]:
        """End the run.

        Returns:
          The requests that have not ended, and their metrics so far.
        """
        ...
