"""Records of a workload: its requests, and each engine after each of its steps."""

from dataclasses import dataclass, field, fields

from longctx.serving.engine.metrics import EngineStats, StepMetrics
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
      [(0, 0.173, 0.0069), (1, 0.186, 0.0068)]
    """

    due: float
    metrics: Metrics
    ttft: float
    tpot: float | None
    number: int = 0
    instance: str = ""

    @classmethod
    def of(cls, metrics: Metrics, due: float, start: float, number: int = 0, instance: str = "") -> "Served":
        """A request as its engine's metrics have it.

        Args:
          metrics: with a first token.
          due: seconds after `start`.
          start: of the workload, on the metrics' clock, in seconds.
          number: of the request in its workload.
          instance: name of the one that served it.
        """
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


@dataclass
class Record:
    """Results of a workload: its requests, and the engines after each step.

    `steps` and `timeline` are of all instances together, and empty where steps are not kept; `stats` is None then.

    Attributes:
      seconds: from the beginning of the workload to the end of the window or of the last request.
      failed: requests that ended with an error; they are not among those served.
      served: requests that ended, in the order in which they did.
      timeline: (seconds, running, waiting) after each step.
      stats: of all instances, summed; of the last step.
      steps: in the order of time.
      open: those that had not ended when the window closed.
      instances: what each of them computed.

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
      0.09
      >>> record.totals.rows, record.totals.steps == len(record.steps)
      (139012, True)
    """

    seconds: float = 0.0
    failed: int = 0  # requests that ended with an error; they are not among those served
    served: list[Served] = field(default_factory=list)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, running, waiting
    stats: EngineStats | None = None  # of all instances, summed
    steps: list[StepMetrics] = field(default_factory=list)  # of an engine, where its monitor appends to it
    open: list[Open] = field(default_factory=list)
    instances: list[InstanceRecord] = field(default_factory=list)

    @property
    def totals(self) -> Totals:
        """Totals of all instances together."""
        return sum((instance.totals for instance in self.instances), Totals())


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
