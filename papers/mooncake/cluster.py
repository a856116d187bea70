"""Mooncake's clusters in virtual time: prefill and decode instances behind the conductor, and coupled ones.

An instance is LLaMA2-70B on a host of 8 A800 (section 7). Prompts are computed in chunks of `CHUNK` tokens; what has
been computed is kept in 1 TB of the host's memory, 3 million tokens.

Coupled instances are vLLM of the paper's time: whole prompts at once, before decodes go on; prefixes are shared among
the requests of an instance, in the devices' memory.
"""

import dataclasses
import functools
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import Literal

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.parallel import Topology
from longctx.serving import ParallelPlan
from longctx.serving.predictor import CurvePredictor
from longctx.simulation import Record, Simulation
from longctx.simulation.cluster import ClusterSettings
from longctx.simulation.deployment import ClusterDeployment
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest

MODEL = MODELS["llama-2-70b"]
TOPOLOGY = Topology.preset("a100-800g")
TENSOR = 8  # GPUs of an instance: a host
PLAN = ParallelPlan(tensor=TENSOR)
CHUNK = 4096  # tokens of a chunk of a prompt; "typically larger than 1000" (3)
TTFT, TPOT = 30.0, 0.1  # seconds, the SLOs of figure 11
PAPER = ClusterSettings()
"""The paper's protocol: the prefill instance draws the first token, and pages leave layer by layer."""
SERVERS = ClusterSettings(first_token="decode", overlap="chunk")
"""That of longctx's servers: full pages leave chunk by chunk, and the rest is computed where a request decodes."""
HOST_BYTES = 10**12  # of a host's memory that keeps pages of prefixes


@functools.cache
def predict() -> CurvePredictor:
    """Seconds of an instance's steps, by the one cost model."""
    return predictor(MODEL, TOPOLOGY, PLAN, max_rows=CHUNK)


def host_bandwidth() -> float:
    """Bytes per second that an instance sends, over all its network cards."""
    link = TOPOLOGY.link("context")
    return TENSOR * link.bandwidth * link.share


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """Results of a run; arrays are of the requests that completed: `[completed]`.

    Attributes:
      due, ttft: seconds: when it came, and from then to its first token.
      tpot, tbt: seconds between its tokens: their mean, and that of the longest tenth of them, which is FAST'25's TBT;
        0 if it has one token.
      prompt, cached: tokens.
      came: requests in all.
      rejected: before each stage.
      num_fetched: prefixes that went from one prefill instance to another.
      loads: seconds, load of the prefill pool, load of the decode pool, `[reports, 3]`.
      seconds: until the last of them ended.
    """

    due: np.ndarray
    ttft: np.ndarray
    tpot: np.ndarray
    tbt: np.ndarray
    prompt: np.ndarray
    cached: np.ndarray
    came: int
    rejected: dict[str, int]
    num_fetched: int
    loads: np.ndarray
    seconds: float

    @classmethod
    def of(cls, record: Record, came: int) -> "Outcome":
        """Make it of the record of `came` requests."""

        def column(values: Iterable[object]) -> np.ndarray:
            return np.array(list(values), float)

        served, stages = record.served, [each.stage for each in record.rejected]
        return cls(
            column(x.due for x in served),
            column(x.ttft for x in served),
            column(x.tpot or 0.0 for x in served),
            column(x.tbt or 0.0 for x in record.placed),
            column(x.metrics.prompt_tokens for x in served),
            column(x.metrics.cached_tokens for x in served),
            came,
            {stage: stages.count(stage) for stage in ("prefill", "decode")},
            sum(each.kind == "prefix" for each in record.moved),
            column(record.loads).reshape(-1, 3),
            record.seconds,
        )

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that had been computed before."""
        return float(self.cached.sum() / max(1.0, self.prompt.sum()))

    def good(self, ttft: float, tbt: float, tail: bool = False) -> float:
        """Goodput: of all requests the share that completed with TTFT and TBT in time.

        Args:
          tail: TBT is that of the longest tenth of the gaps; else the mean of all.
        """
        gaps = self.tbt if tail else self.tpot
        return float(((self.ttft <= ttft) & (gaps <= tbt)).sum() / self.came)

    def waits(self) -> np.ndarray:
        """TTFT of all requests, infinite of those that were not served; `[came]`."""
        return np.concatenate([self.ttft, np.full(self.came - len(self.ttft), np.inf)])


def deployment(shape: str, config: ConductorConfig, single: bool = False) -> ClusterDeployment:
    """A cluster such as "3P+1D", or "4M": coupled instances.

    Args:
      single: coupled instances serve one request at a time (7.1.2).
    """
    counts = {part[-1]: int(part[:-1]) for part in shape.split("+")}
    return ClusterDeployment(
        MODEL,
        TOPOLOGY,
        PLAN,
        prefill=counts.get("P", 0),
        decode=counts.get("D", 0),
        coupled=counts.get("M", 0),
        config=config,
        chunk=CHUNK,
        max_running=1 if single and "M" in counts else 256,
        host_bytes=HOST_BYTES,
        bandwidth=host_bandwidth(),
        latency=TOPOLOGY.link("context").latency,
    )


def serve(
    shape: str,
    requests: List[WorkloadRequest],
    *,
    policy: str | None = None,
    admission: Literal["none", "baseline", "early_rejection", "predicted_early_rejection"] = "none",
    decode_limit: float = 1.0,
    load_limit: float = 1.0,
    prefill_load: Literal["request", "instance"] = "request",
    tpot: float = TPOT,
    settings: ClusterSettings = PAPER,
    single: bool = False,
    seed: int = 0,
    give_up: float | None = None,
) -> Outcome:
    """Serve a workload; see `deployment`.

    Args:
      admission, decode_limit, load_limit, prefill_load, tpot: of the conductor.
      settings: the protocol, `PAPER` or `SERVERS`.
      policy: None: KVCache-centric, and for coupled instances least loaded.
      give_up: a limit of TTFT in seconds: the run ends when more than a tenth of the requests have missed it, and the
        others of the outcome were not served. None: all are served.
    """
    default = "least_loaded" if "M" in shape else "kvcache_centric"
    config = ConductorConfig(
        policy=policy or default,
        admission=admission,
        ttft=TTFT,
        tpot=tpot,
        decode_limit=decode_limit,
        load_limit=load_limit,
        prefill_load=prefill_load,
        seed=seed,
    )
    instances = deployment(shape, config, single).instances()
    if admission == "none":  # who finds no memory where it decodes waits in that host's
        instances = [dataclasses.replace(each, is_patient=True) for each in instances]
    lost = None if give_up is None else _Lost(give_up, len(requests) // 10)
    simulation = Simulation(instances, Conductor(config, PrefixIndex()), settings)
    record = simulation.run(requests, seed, progress=lost, keep_steps=False)
    return Outcome.of(record, len(requests))


class _Lost:
    """Callback that ends a run in which more requests than are allowed have missed a TTFT."""

    def __init__(self, ttft: float, allowed: int) -> None:
        self._ttft, self._left, self._seen = ttft, allowed, 0

    def __call__(self, record: Record) -> bool:
        if len(record.served) > self._seen:
            self._left -= sum(each.ttft > self._ttft for each in record.served[self._seen :])
            self._seen = len(record.served)
        return self._left < 0
