"""Records of a workload: its requests, each engine after each of its steps, and what a conductor decided."""

from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from longctx.cluster.conductor.config import Role
from longctx.cluster.conductor.request import Assignment, Bound
from longctx.serving.engine.metrics import EngineStats, StepMetrics
from longctx.serving.predictor.work import Work
from longctx.serving.request.output import Metrics


@dataclass(frozen=True)
class Served:
    """A request that has ended; seconds from the beginning of the workload.

    Attributes:
      due: when it was to come.
      metrics: as its engine has them, on the clock of the loop.
      ttft: from when it was due to its first token.
      tpot: mean time of each later token; None: there was one token.
      number: the request's in its workload.
      instance: name of the one that served it.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import Lengths, synthesize
      >>> model, config = LlamaConfig.preset("llama-3-8b"), EngineConfig(num_pages=2000)
      >>> seconds = predictor(model, "h100-nvlink", max_rows=config.token_budget)
      >>> requests = synthesize(2, Lengths(3000, 3000), Lengths(100, 100))
      >>> record = Simulation([Instance(model, config, seconds)]).run(requests)
      >>> [(served.number, round(served.ttft, 3), round(served.tpot, 4)) for served in record.served]
      [(0, 0.134, 0.0065), (1, 0.145, 0.0065)]
    """

    due: float
    metrics: Metrics
    ttft: float
    tpot: float | None
    number: int = 0
    instance: str = ""

    @classmethod
    def of(cls, metrics: Metrics, due: float, start: float, number: int = 0, instance: str = "") -> "Served":
        """A request as its metrics have it, which was due `due` seconds after `start` by the metrics' clock."""
        assert metrics.first_token is not None
        return cls(due, metrics, metrics.first_token - start - due, metrics.tpot, number, instance)

    @property
    def kept_ttft(self) -> bool | None:
        """True if the first token came in time, from when the request was due."""
        return None if self.metrics.ttft_deadline is None else self.ttft <= self.metrics.ttft_deadline


@dataclass(frozen=True)
class Open:
    """A request that had come and not ended when the window closed; seconds from the beginning of the workload.

    `ttft`: seconds from when it was due to its first token; None: it had none yet. `metrics.output_tokens`: how many
    tokens it had.
    """

    due: float
    metrics: Metrics
    ttft: float | None
    number: int = 0
    instance: str = ""


@dataclass
class Totals:
    """Sums over what an instance has computed, from which FLOPs, bytes and utilisation follow.

    Attributes:
      steps: batches that computed something.
      rows: tokens computed.
      samples: rows of logits.
      pairs: pairs of a query and a key that attention compared.
      keys: keys that attention read, counted once for each chunk.
      busy: seconds in which some stage computed.
      stage_seconds: seconds of each batch in one stage, summed; with S stages at most S times `busy`.
      decode_pairs: of `pairs`, those of chunks of one token.
      window_pairs, window_keys, window_decode_pairs: the same of a layer with a sliding window, if the model has some;
        all others are of a layer without.

    Examples:
      >>> from longctx.simulation import Totals
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.utilization import model_flops
      >>> prompt = Totals(steps=1, rows=1000, samples=1, pairs=500_500, keys=1000, busy=0.05)
      >>> round(model_flops(MODELS["llama-3-8b"], prompt) / 1e12)  # TFLOP
      14
    """

    steps: int = 0
    rows: int = 0
    samples: int = 0
    pairs: int = 0
    keys: int = 0
    busy: float = 0.0
    stage_seconds: float = 0.0
    decode_pairs: int = 0
    window_pairs: int = 0
    window_keys: int = 0
    window_decode_pairs: int = 0

    def add(self, work: Work, seconds: float, busy: float, steps: int = 1) -> None:
        """Add batches that were computed: their work, their seconds in one stage, and those in which some computed."""
        self.steps += steps
        self.rows += work.rows
        self.samples += work.samples
        self.pairs += work.pairs
        self.keys += work.keys
        self.decode_pairs += work.decode_keys
        if work.window:
            self.window_pairs += work.window_pairs
            self.window_keys += work.window_keys
            self.window_decode_pairs += work.window_decode_keys
        self.stage_seconds += seconds
        self.busy += busy

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class InstanceRecord:
    """Record of one instance: its devices, what they computed, and its steps if they were kept."""

    name: str
    num_devices: int
    totals: Totals
    steps: list[StepMetrics]
    stats: EngineStats | None = None


class Placed(NamedTuple):
    """Place where a request was served, and the prediction.

    Attributes:
      assignment: the last one: names of instances, and predicted seconds.
      num_assigned: how often it was assigned, in all: more than once after failures.
      tbt: mean of the longest tenth of the gaps between its tokens, seconds (Mooncake, FAST'25, 5.1); None: it had one
        token.
    """

    assignment: Assignment
    num_assigned: int
    tbt: float | None


class Rejected(NamedTuple):
    """A request that was not served, see `longctx.cluster.conductor.request.Rejection`.

    Attributes:
      due: when it came, seconds from the beginning of the workload. at: when it was rejected.
      deferred: how often it was told to come again before.
      ttft, tbt: predicted seconds, had it been accepted.
    """

    number: int
    due: float
    at: float
    stage: Literal["prefill", "decode"]
    bound: Bound
    ttft: float
    tbt: float
    load: float
    prompt_tokens: int
    deferred: int = 0


class Moved(NamedTuple):
    """Pages that went from one instance to another.

    Attributes:
      kind: `"prefix"`: of a prefix, to where a prompt is computed; `"pages"`: of a whole prompt, to where it decodes.
      begun, ended: seconds from the beginning of the workload.
      exposed: seconds that somebody waited for them: of `"pages"`, since the prompt had been computed.
    """

    number: int
    kind: Literal["prefix", "pages"]
    source: str
    target: str
    num_bytes: float
    begun: float
    ended: float
    exposed: float


class LoadPoint(NamedTuple):
    """The load of both pools at a time: predicted TTFT and TBT over their SLOs (Mooncake, 6.1)."""

    at: float
    prefill: float
    decode: float


class RoleAt(NamedTuple):
    """An instance has another role from a time on."""

    at: float
    instance: str
    role: Role


@dataclass
class Record:
    """Results of a workload: its requests, the engines after each step, and what a conductor decided, if there was one.

    `steps` and `timeline` are of all instances together, and empty where steps are not kept; `stats` is None then.
    Times are seconds from the beginning of the workload.

    Attributes:
      seconds: from the beginning of the workload to the end of the window or of the last request.
      failed: requests that ended with an error; they are not among those served.
      served: requests that ended, in the order in which they did.
      timeline: (seconds, running, waiting) after each step.
      stats: of all instances, summed; of the last step.
      steps: in the order of time.
      open: those that had not ended when the window closed.
      instances: what each of them computed.
      placed: behind a conductor, of each request in `served`, in the same order.
      rejected: in the order of rejections.
      loads: of both pools, at every report.
      moved: pages, in the order in which they ended.
      roles: changes of roles.
      num_deferred: how often a request was told to come again.
      num_reassigned: how often a request was assigned anew, as an instance died.

    Source:
      Mooncake, 2 (goodput: only completed requests count) and 6 (loads).

    Examples:
      >>> import statistics
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> model, config = LlamaConfig.preset("llama-3-8b"), EngineConfig(num_pages=2000)
      >>> seconds = predictor(model, "h100-nvlink", max_rows=config.token_budget)
      >>> requests = arrive_at_rate(make_mix("sharegpt4", 50), rate=5.0)
      >>> record = Simulation([Instance(model, config, seconds)]).run(requests)
      >>> round(statistics.median(served.ttft for served in record.served), 2)
      0.07
      >>> record.totals.rows, record.totals.steps == len(record.steps)
      (139012, True)
    """

    seconds: float = 0.0
    failed: int = 0
    served: list[Served] = field(default_factory=list)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    stats: EngineStats | None = None
    steps: list[StepMetrics] = field(default_factory=list)  # of an engine, where its monitor appends to it
    open: list[Open] = field(default_factory=list)
    instances: list[InstanceRecord] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    loads: list[LoadPoint] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    roles: list[RoleAt] = field(default_factory=list)
    num_deferred: int = 0
    num_reassigned: int = 0

    @property
    def totals(self) -> Totals:
        """Totals of all instances together."""
        return sum((instance.totals for instance in self.instances), Totals())

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens whose keys and values were found, of requests that were served."""
        cached = sum(each.metrics.cached_tokens for each in self.served)
        return cached / max(1, sum(each.metrics.prompt_tokens for each in self.served))

    def goodput(self, ttft: float, tpot: float) -> list[Served]:
        """Return the requests that completed within both SLOs, in seconds.

        Source:
          Mooncake, 2: only completed requests count.
        """
        return [each for each in self.served if each.ttft <= ttft and (each.tpot is None or each.tpot <= tpot)]


def sum_stats(stats: list[EngineStats]) -> EngineStats | None:
    """Counts of several engines together; None for none."""
    if not stats:
        return None
    return EngineStats(*(sum(getattr(each, one.name) for each in stats) for one in fields(EngineStats)))


def merge_timelines(timelines: list[list[tuple[float, int, int]]]) -> list[tuple[float, int, int]]:
    """(seconds, running, waiting) of all instances together, whenever that of one of them changes."""
    if len(timelines) == 1:
        return timelines[0]
    last, running, waiting, merged = [(0, 0)] * len(timelines), 0, 0, []
    events = sorted((at, i, x, y) for i, timeline in enumerate(timelines) for at, x, y in timeline)
    for at, i, here, waits in events:
        running, waiting = running + here - last[i][0], waiting + waits - last[i][1]
        last[i] = here, waits
        merged.append((at, running, waiting))
    return merged
