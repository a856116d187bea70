"""LoongServe: elastic context parallelism, first come first served, no preemption."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from longctx.models import LlamaConfig, cache_bytes
from longctx.parallel import Topology
from longctx.serving import EngineStats, Metrics, ParallelPlan, StepMetrics
from longctx.serving.predictor import Predictor, Work
from longctx.simulation import EventLoop, Totals
from longctx.simulation.hardware import predictor
from longctx.simulation.utilization import max_tokens
from longctx.simulation.workloads import WorkloadRequest
from papers.loongserve.decode_group import Active, DecodeGroup

_MOST_PROMPTS = 16  # that are divided into groups at a time
_ROWS = 4096  # that predictors are asked for at least; prompts are longer, and predicted by the same products


class LoongServe:
    """A cluster of small instances, which form groups for each batch of whole prompts, and shrink again for decodes.

    What it is modelled on is LoongServe's design as published, and what Medha says of it (2.2, 2.3, 5.2, 5.4):

    - An instance is `tensor` devices. It prefills, decodes, or is free; prompts and decodes never share a step.
    - Prompts are prefilled whole, in order of arrival, each as soon as some instance is free for it and there is memory
      for its tokens and its answer. No request passes the first in the queue, and none is preempted.
    - A batch of prompts has 1 to `max_degree` free instances. Who waits first and fits is divided into groups so that
      the sum of their latencies is least; short prompts are put together up to the tipping point, from which on longer
      batches are read no faster a token. A group's prompts are sharded over it, keys go round in a ring.
    - When a batch has been read, its keys and values are on the fewest of its instances that have room (which costs
      nothing: they stay there as they go round), and it decodes there. The others are free.
    - If the first in the queue has no instance, or gains more than that costs, the decoding instance that has the
      fewest tokens moves them to another one that has room, and becomes free. Its requests wait for the transfer.

    Left out, in its favour: messages of its global manager; which instances of a group are on one host.

    Args:
      model: what is served.
      topology: its devices, and the links within an instance (tensor) and between them (context).
      num_instances: in all.
      tensor: devices of each.
      max_degree: of instances that prefill a batch.
      name: that no other server of a simulation has.

    Raises:
      ValueError: a number is out of range, or the model doesn't suit `tensor` or an instance's memory.

    Source:
      LoongServe (SOSP'24), as published; Medha, 2.2, 2.3, 5.2 and 5.4.

    Examples:
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.simulation import Simulation
      >>> from papers.loongserve import LoongServe
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import WorkloadRequest
      >>> server = LoongServe(MODELS["llama-3-8b"], Topology.preset("medha-a100"), num_instances=4)
      >>> prompts = [WorkloadRequest(0.0, 500_000, 10), WorkloadRequest(1.0, 1000, 10, number=1)]
      >>> record = Simulation([server]).run(prompts)
      >>> [(served.number, round(served.ttft, 1)) for served in record.served]  # the short one waits for the long one
      [(1, 48.2), (0, 49.2)]
    """

    def __init__(
        self,
        model: LlamaConfig,
        topology: Topology,
        num_instances: int = 8,
        tensor: int = 2,
        max_degree: int = 4,
        name: str = "loongserve",
    ) -> None:
        if num_instances < 1 or max_degree < 1:
            raise ValueError(f"num_instances and max_degree must be at least 1, got {num_instances} and {max_degree}")
        self.max_degree = min(max_degree, num_instances)
        self.cost = LoongServeCost(model, topology, tensor, self.max_degree)
        if not self.cost.capacity:
            raise ValueError(f"tensor must be larger: {tensor} devices have no memory beside the weights")
        self.name, self.num_devices, self.keep_steps = name, num_instances * tensor, True
        self._num_instances = num_instances

    def attach(self, loop: EventLoop, on_end: Callable[[WorkloadRequest, Metrics], object], seed: int = 0) -> None:
        """Begin a run, see `Server.attach`. Nothing is random."""
        self._loop, self._on_end = loop, on_end
        self._free = self._num_instances
        self._queue: deque[Active] = deque()
        self._reading: list[Active] = []
        self._groups: list[tuple[int, DecodeGroup]] = []  # instances that each has
        self._moving: dict[int, list[Active]] = {}  # requests between two groups
        self.steps: list[StepMetrics] = []
        self.timeline: list[tuple[float, int, int]] = []
        self.totals = Totals()

    @property
    def stats(self) -> EngineStats | None:
        """None: it is no engine of ours."""
        return None

    @property
    def prefill_seconds(self) -> float:
        """Predicted seconds of all prompts that have not been read, each alone on a group of the largest degree."""
        prompts = [*self._queue, *self._reading]
        return sum(self.cost.prefill_seconds((each.context,), self.max_degree) for each in prompts)

    def check(self, request: WorkloadRequest) -> None:
        """Check a request.

        Raises:
          ValueError: it is longer than the memory of its largest group.
        """
        most = self.cost.capacity * self.max_degree
        if request.length > most:
            raise ValueError(f"has {request.length} tokens, more than the {most} of {self.max_degree} instances")

    def add(self, request: WorkloadRequest, arrival: float) -> None:
        """A request comes at `loop.now`; it was due at `arrival`."""
        metrics = Metrics(arrival, request.prompt_tokens)
        self._queue.append(Active(request, metrics, request.prompt_tokens, request.output_tokens))
        self._dispatch()

    def stop(self) -> list[tuple[WorkloadRequest, Metrics]]:
        """End the run.

        Returns:
          The requests that have not ended, and their metrics so far.
        """
        decoding = [each for _, group in self._groups for each in group.active]
        left = [*self._queue, *self._reading, *decoding, *itertools.chain(*self._moving.values())]
        return [(each.request, each.metrics) for each in left]

    def _dispatch(self) -> None:
        """Begin to read prompts, as many as there are instances and memory for."""
        while self._queue:
            ready = self._take_instances()
            batches = self._plan()
            if not batches:
                break
            for prompts, degree in batches:
                for each in prompts:
                    assert self._queue.popleft() is each
                self._prefill(prompts, degree, ready)
        self._note()

    def _plan(self) -> list[tuple[list[Active], int]]:
        """Batches of those who wait first, and the instances of each; none if not even the first one fits."""
        if not self._free:
            return []
        most, tokens, waiting = self._free * self.cost.tipping_point, 0, list[Active]()
        for each in self._queue:
            tokens += each.context
            if waiting and (tokens > most or len(waiting) == _MOST_PROMPTS):
                break
            waiting.append(each)
        known: dict[tuple[int, int, int], float] = {}

        def seconds(first: int, stop: int, degree: int) -> float:
            key = first, stop, degree
            if key not in known:
                prompts = waiting[first:stop]
                total = sum(each.context for each in prompts)
                fits = sum(each.context + each.left for each in prompts) <= degree * self.cost.capacity
                if not fits or (len(prompts) > 1 and total > max(degree * self.cost.tipping_point, 1)):
                    known[key] = float("inf")
                else:
                    known[key] = self.cost.prefill_seconds([each.context for each in prompts], degree)
            return known[key]

        while waiting:
            groups = plan_groups(seconds, len(waiting), self._free, self.max_degree)
            if groups is not None:
                return [(waiting[group.first : group.stop], group.degree) for group in groups]
            waiting.pop()
        return []

    def _take_instances(self) -> float:
        """Free decoding instances for the first in the queue, if that pays; when they are free."""
        head, ready = self._queue[0], self._loop.now
        while self._free < self.max_degree:
            singles = [group for count, group in self._groups if count == 1]
            movable = [group for group in singles if not group.promised]
            if len(singles) < 2 or not movable:
                break
            source = min(movable, key=lambda group: group.tokens)
            room = [g for g in singles if g is not source and g.tokens + source.tokens <= self.cost.capacity]
            if not room:
                break
            seconds = self.cost.migration_seconds(sum(each.context for each in source.active))
            if head.context + head.left <= self._free * self.cost.capacity:
                now, then = (self.cost.prefill_seconds([head.context], self._free + more) for more in (0, 1))
                if now - then <= seconds * (1 + len(source.active)):
                    break
            target = min(room, key=lambda group: group.tokens)
            ready = max(ready, self._migrate(source, target, seconds))
        return ready

    def _migrate(self, source: DecodeGroup, target: DecodeGroup, seconds: float) -> float:
        """Move all requests of an instance to another, and free it; when it is free."""
        tokens = source.tokens
        target.promised += tokens  # reserves their room
        self._groups = [each for each in self._groups if each[1] is not source]
        self._free += 1
        self._moving[id(source)] = source.active
        moved: list[Active] = []

        def leave() -> None:
            moved.extend(source.active)
            source.active = []
            self._moving[id(source)] = moved
            self._loop.at(self._loop.now + seconds, lambda: target.change(arrive))

        def arrive() -> None:
            target.promised -= tokens
            target.active += moved
            del self._moving[id(source)]

        return source.change(leave) + seconds

    def _prefill(self, prompts: list[Active], degree: int, ready: float) -> None:
        """Read a batch on free instances, from `ready` on."""
        self._free -= degree
        self._reading += prompts
        lengths = [each.context for each in prompts]
        seconds = self.cost.prefill_seconds(lengths, degree)
        for each in prompts:
            each.metrics.admitted = ready
        self._loop.at(ready + seconds, lambda: self._begin_decode(prompts, degree, seconds))

    def _begin_decode(self, prompts: list[Active], degree: int, seconds: float) -> None:
        """A batch has been read: its first tokens are there, and the instances that it needs no more are free."""
        now = self._loop.now
        self._count(Work.of((0, each.context, True) for each in prompts), 1, degree * seconds)
        self._reading = [each for each in self._reading if each not in prompts]
        for each in prompts:
            each.metrics.first_token = each.metrics.last_token = now
            each.metrics.output_tokens, each.left = 1, each.left - 1
        ended = [each for each in prompts if not each.left]
        active = [each for each in prompts if each.left]
        kept = -(-sum(each.context + each.left for each in active) // self.cost.capacity)
        self._free += degree - kept
        if active:
            group = self._make_group(kept)
            self._groups.append((kept, group))
            group.change(lambda: group.active.extend(active))
        for each in ended:
            self._end(each)
        self._dispatch()

    def _make_group(self, count: int) -> DecodeGroup:
        """Make a group of `count` instances, which share its keys evenly."""

        def seconds(rows: int, keys: int) -> float:
            return self.cost.decode_seconds(rows, -(-keys // count), count)

        def note(steps: int, rows: int, keys: int, took: float) -> None:
            self._count(Work(steps * rows, steps * rows, keys), steps, count * took)

        return DecodeGroup(self._loop, seconds, note, self._end, self._free_if_empty)

    def _free_if_empty(self, group: DecodeGroup) -> None:
        counts = [count for count, each in self._groups if each is group]
        if counts and not group.active and not group.promised:
            self._groups = [each for each in self._groups if each[1] is not group]
            self._free += counts[0]
            self._dispatch()

    def _end(self, ended: Active) -> None:
        ended.metrics.finished = self._loop.now
        self._on_end(ended.request, ended.metrics)
        self._note()

    def _count(self, work: Work, steps: int, seconds: float) -> None:
        """Count batches: their rows and keys, and the seconds of all instances together that they took."""
        self.totals.add(work, seconds / self._num_instances, seconds / self._num_instances, steps)

    def _note(self) -> None:
        """Note how many requests run and wait."""
        if self.keep_steps:
            moving = sum(map(len, self._moving.values()))
            decoding = sum(len(group.active) for _, group in self._groups)
            self.timeline.append((self._loop.now, len(self._reading) + decoding + moving, len(self._queue)))


class Group(NamedTuple):
    """Consecutive prompts, from `first` to before `stop`, that are prefilled in one batch on `degree` instances."""

    first: int
    stop: int
    degree: int


def plan_groups(
    seconds: Callable[[int, int, int], float], num_prompts: int, num_instances: int, max_degree: int
) -> list[Group] | None:
    """Divide prompts, in their order, and instances into groups, so that the sum of the prompts' seconds is least.

    Args:
      seconds: of a batch of the prompts from `first` to before `stop` on `degree` instances; infinite: they don't fit.

    Returns:
      The groups, in the prompts' order; they may leave instances over. None: the prompts don't fit.

    Source: LoongServe's batching of prefills (Wu et al., SOSP 2024), which minimises the summed input latency so.
    """
    # best[n][k]: the least sum of the first n prompts on k instances, and the last group.
    best: list[list[tuple[float, Group | None]]] = [[(0.0, None)] * (num_instances + 1)]
    for stop in range(1, num_prompts + 1):
        row: list[tuple[float, Group | None]] = [(math.inf, None)]
        for instances in range(1, num_instances + 1):
            least, chosen = row[-1]  # one instance less
            for degree in range(1, min(instances, max_degree) + 1):
                for first in range(stop):
                    before = best[first][instances - degree][0]
                    if before < least:
                        total = before + (stop - first) * seconds(first, stop, degree)
                        if total < least:
                            least, chosen = total, Group(first, stop, degree)
            row.append((least, chosen))
        best.append(row)
    groups, stop, left = [], num_prompts, num_instances
    while stop:
        group = best[stop][left][1]
        if group is None:
            return None
        groups.append(group)
        stop = group.first
        # The group may have been chosen with fewer instances, of which the rest of the sum was computed.
        left = next(k for k in range(group.degree, left + 1) if best[group.stop][k] == best[group.stop][left])
        left -= group.degree
    return groups[::-1]


class LoongServeCost:
    """Seconds of batches on instances of `tensor` devices each.

    Prompts are sharded over the instances of a group and attend in a ring (pass-KV), which attention hides as far as it
    can. Decodes are replicated over the instances that have their keys, and merged.

    Attributes:
      capacity: tokens whose keys and values fit into one instance.
      tipping_point: tokens of a batch beyond which a longer one is read no faster a token.
    """

    def __init__(self, model: LlamaConfig, topology: Topology, tensor: int, max_degree: int) -> None:
        self._predictors: dict[int, Predictor] = {
            degree: predictor(model, topology, ParallelPlan(1, degree, tensor), max_rows=_ROWS)
            for degree in range(1, max_degree + 1)
        }
        self.capacity = max_tokens(model, ParallelPlan(1, 1, tensor), topology.device)
        link = topology.link("context")
        self._token_seconds = cache_bytes(model, 1, 1, tensor) / (link.bandwidth * link.share)
        self._latency = link.latency
        sizes = [1 << power for power in range(_ROWS.bit_length())]
        speeds = {size: size / self._predictors[1].seconds(Work(size, 1)) for size in sizes}
        self.tipping_point = next(size for size in sizes if speeds[size] >= 0.95 * max(speeds.values()))

    def prefill_work(self, prompts: Iterable[int], degree: int) -> Work:
        """Return a rank's work of whole prompts of these lengths, in one batch on `degree` instances."""
        work, rows = Work(), 0
        for tokens in prompts:
            if degree == 1:
                work = work.with_chunk(0, tokens, True)
            else:
                share = -(-(rows + tokens) // degree) - -(-rows // degree)
                work, rows = work.with_sharded(0, tokens, degree, 0, True, "pass_kv", share), rows + tokens
        return work

    def prefill_seconds(self, prompts: Iterable[int], degree: int) -> float:
        """Predict the seconds of whole prompts of these lengths, in one batch on `degree` instances."""
        return self._predictors[degree].seconds(self.prefill_work(prompts, degree))

    def decode_seconds(self, rows: int, keys: int, degree: int) -> float:
        """Seconds of one token for each of `rows` requests, where the fullest of `degree` instances has `keys` keys."""
        return self._predictors[degree].seconds(Work(rows, rows, keys, replicated=rows if degree > 1 else 0))

    def migration_seconds(self, tokens: int) -> float:
        """Predict the seconds in which the keys and values of `tokens` tokens move to another instance."""
        return self._latency + tokens * self._token_seconds
