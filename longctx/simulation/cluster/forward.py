"""Runs snapshots of a conductor forward, in simulated cores: what would have come of a request."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from longctx.cluster.conductor.audit import Outcome
from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.conductor.snapshot import InstanceSnapshot, OpenTask, Snapshot
from longctx.models.config import LlamaConfig
from longctx.serving.config import EngineConfig
from longctx.simulation.cluster.cluster_instance import ClusterInstance
from longctx.simulation.cluster.core import ClusterCore
from longctx.simulation.cluster.leg import Leg
from longctx.simulation.event_loop import EventLoop
from longctx.simulation.instance.tokenless import TokenlessCompletion
from longctx.simulation.workloads import WorkloadRequest

_AT_ONCE = 1e18  # bytes per second: what is on the devices in the snapshot is there
_MOMENT = 1e-6  # seconds: longer than that takes


class ClusterForward:
    """A `Forward` of the shadow audit.

    The open requests go on where they are, with nobody who comes later; once with the request and once without it.
    Prompts go on behind what is cached or computed of them. Pages move in no time; requests have as many tokens as the
    snapshot says, which is what is known on average. Only instances that the request has to do with are simulated: both
    of its own, and those whose prompts will decode beside it.

    Args:
      instances: all that snapshots may name.

    Source: Mooncake, section 6: whether a request may be accepted.
    """

    def __init__(self, instances: Iterable[ClusterInstance]) -> None:
        self._specs = {}
        for each in instances:
            config = dataclasses.replace(each.config, tiers=None, prefix_cache=False)
            self._specs[each.name] = dataclasses.replace(each, config=config, host_bandwidth=_AT_ONCE)

    def __call__(self, snapshot: Snapshot) -> Outcome:
        """What would have come of the request; ValueError: the snapshot has instances that this has not."""
        task = snapshot.task
        beside = {each.prefill for each in snapshot.open if each.decode == task.decode and not each.generated}
        names = {task.prefill, task.decode} | beside
        missing = names - self._specs.keys()
        if missing:
            raise ValueError(f"snapshot must have instances of {sorted(self._specs)}, got {sorted(missing)}")
        others = [each for each in snapshot.open if (each.decode if each.generated else each.prefill) in names]
        specs = [self._specs[name] for name in sorted(names)]
        *after, mine = _run(specs, [*others, task])
        before = _run(specs, others)
        broken = sum(a.is_broken and not b.is_broken for a, b in zip(after, before, strict=True))
        return Outcome(mine.ttft, mine.tbt, broken)


class ServedForward:
    """A `Forward` of instances that really serve, each as its snapshot says: its predictor, plan, memory and places.

    Args:
      config: of their engines.
    """

    def __init__(self, model: LlamaConfig, config: EngineConfig) -> None:
        self._model, self._config = model, config

    def __call__(self, snapshot: Snapshot) -> Outcome:
        """What would have come of the request; TypeError: an instance's costs are not `PredictorCosts`."""
        return ClusterForward(map(self._instance, snapshot.instances))(snapshot)

    def _instance(self, instance: InstanceSnapshot) -> ClusterInstance:
        spec = instance.spec
        costs = spec.costs
        if not isinstance(costs, PredictorCosts):
            raise TypeError(f"costs of {spec.name} must be PredictorCosts, got {type(spec.costs).__name__}")
        size, plan = spec.block_size, costs.plan
        pages = max(1, spec.decode_tokens // size // plan.context)
        config = dataclasses.replace(self._config, page_size=size, num_pages=pages, max_running=spec.max_running)
        return ClusterInstance(spec.name, instance.role, self._model, config, costs.predictor, plan)


def _run(specs: Sequence[ClusterInstance], tasks: list[OpenTask]) -> list["_TaskRun"]:
    """Serve tasks to their ends, in the order in which they were assigned."""
    loop = EventLoop()
    loop.now = max((each.waited for each in tasks), default=0.0)
    cores = {each.name: ClusterCore(each, loop, seed=0) for each in specs}
    runs = [_TaskRun(number, task, cores, loop) for number, task in enumerate(tasks)]
    for run in sorted(runs, key=lambda run: -run.task.waited):
        # Whose pages are there gets them in a load that takes no time: the others must not be planned before it.
        late = 0.0 if run.task.computed else _MOMENT
        loop.at(loop.now + run.task.ready_in + late, run.begin)
    loop.run()
    return runs


class _TaskRun:
    """A task on its way: a prompt at one core, an answer at another. The owner of its legs."""

    def __init__(self, number: int, task: OpenTask, cores: dict[str, ClusterCore], loop: EventLoop) -> None:
        self.task, self._cores, self._loop = task, cores, loop
        self._request = WorkloadRequest(0.0, task.prompt_tokens, task.output_tokens, number=number)
        self._start, self._id = loop.now, f"request-{number}"
        self.first: float | None = loop.now - task.decoded_for if task.generated else None
        self.last: float | None = None

    def begin(self) -> None:
        task = self.task
        if task.generated:
            self._answer(task.generated)
        elif task.prefill != task.decode:
            self._serve("prompt", task.prefill, 0, 1, task.computed)
        else:
            self._serve("whole", task.prefill, 0, task.output_tokens, task.computed)

    @property
    def ttft(self) -> float:
        """Seconds; inf: it never had a token."""
        return math.inf if self.first is None else self.first - self._start + self.task.waited

    @property
    def tbt(self) -> float:
        """Mean seconds between its tokens; 0: it has one; inf: it did not end."""
        if self.task.output_tokens == 1:
            return 0.0
        if self.first is None or self.last is None:
            return math.inf
        return (self.last - self.first) / (self.task.output_tokens - 1)

    @property
    def is_broken(self) -> bool:
        """Whether it misses an SLO, as far as it was simulated: an answer elsewhere is not."""
        return self.ttft > self.task.ttft or (self.task.decode in self._cores and self.tbt > self.task.tpot)

    def _answer(self, known: int) -> None:
        came = self.task.prompt_tokens + known - 1
        self._serve("answer", self.task.decode, known, self.task.output_tokens - known, came)

    def _serve(
        self, part: Literal["prompt", "answer", "whole"], name: str, known: int, max_tokens: int, came: int
    ) -> None:
        arrival = self._start - self.task.waited
        self._cores[name].serve(Leg(self._request, self._id, arrival, self, known, max_tokens, came, part=part))

    # What cores tell.

    def leg_ends(self, leg: Leg, part: TokenlessCompletion) -> None:
        if self.first is None:
            self.first = part.metrics.first_token
        if leg.part != "prompt" or self.task.output_tokens == 1:
            self.last = self._loop.now
        elif self.task.decode in self._cores:
            self._answer(1)

    def chunk_begins(self, leg: Leg, start: int, tokens: int) -> None:
        pass

    def chunk_ends(self, leg: Leg, start: int, tokens: int) -> None:
        pass

    def first_token(self, leg: Leg) -> None:
        pass

    def prefix_came(self, source: str, num_bytes: float, begun: float) -> None:
        pass
