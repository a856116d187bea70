"""Mooncake's clusters in virtual time: prefill and decode instances behind the conductor, and coupled ones.

An instance is LLaMA2-70B on a host of 8 A800 (section 7). Prompts are computed in chunks of `CHUNK` tokens; what has
been computed is kept in 1 TB of the host's memory, 3 million tokens.

Coupled instances are vLLM of the paper's time: whole prompts at once, before decodes go on; prefixes are shared among
the requests of an instance, in the devices' memory.
"""

import dataclasses
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from longctx.cluster.conductor.config import ConductorConfig
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.simulation.cluster.cluster_instance import ClusterInstance
from longctx.simulation.cluster.cluster_record import ClusterRecord
from longctx.simulation.cluster.cluster_simulation import ClusterSimulation
from longctx.simulation.figures.mooncake_runs import CHUNK, MODEL, PLAN, TOPOLOGY, host_bandwidth, predict
from longctx.simulation.utilization import max_tokens
from longctx.simulation.workloads import TRACE_BLOCK, WorkloadRequest

TTFT, TPOT = 30.0, 0.1  # seconds, the SLOs of figure 11
HOST_BYTES = 10**12  # of a host's memory that keeps pages of prefixes
LONGEST = 2**18  # tokens of the longest prompt that a coupled instance computes at once
MAX_RUNNING = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What a run came to; arrays are of the requests that completed: `[completed]`.

    Attributes:
      due, ttft, tpot, gap: seconds: when it came, to its first token, per token after it on average, and the longest
        between two of its tokens. tpot and gap of a request with one token are 0.
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
    gap: np.ndarray
    prompt: np.ndarray
    cached: np.ndarray
    came: int
    rejected: dict[str, int]
    num_fetched: int
    loads: np.ndarray
    seconds: float

    @classmethod
    def of(cls, record: ClusterRecord, came: int) -> "Outcome":
        """Of a record of so many requests."""

        def column(values: Any) -> np.ndarray:
            return np.array(list(values), float)

        served, stages = record.served, [each.stage for each in record.rejected]
        return cls(
            column(x.due for x in served),
            column(x.ttft for x in served),
            column(x.tpot or 0.0 for x in served),
            column(x.metrics.longest_gap for x in served),
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

    def good(self, ttft: float, tpot: float) -> float:
        """Goodput: of all requests the share that completed within both SLOs."""
        return float(((self.ttft <= ttft) & (self.tpot <= tpot)).sum() / self.came)


def instances(shape: str, single: bool = False) -> list[ClusterInstance]:
    """The instances of a cluster such as "3P+1D", or "4M": coupled ones.

    Args:
      single: coupled ones serve one request at a time (7.1.2).
    """
    found = []
    for part in shape.split("+"):
        count, kind = int(part[:-1]), part[-1]
        role = {"P": "prefill", "D": "decode", "M": "both"}[kind]
        budget = LONGEST if kind == "M" else CHUNK
        config = EngineConfig(
            page_size=TRACE_BLOCK,
            num_pages=max_tokens(MODEL, PLAN, TOPOLOGY.device, CHUNK) // TRACE_BLOCK,
            max_running=1 if single and kind == "M" else MAX_RUNNING,
            token_budget=budget,
            policy="fcfs",
            run_ahead=1,
            tiers=TierConfig(host_bytes=HOST_BYTES) if kind == "P" else None,
        )
        link = TOPOLOGY.link("context")
        found += [
            ClusterInstance(
                f"{role}-{number}", role, MODEL, config, predict(budget), PLAN, TOPOLOGY, host_bandwidth(), link.latency
            )
            for number in range(count)
        ]  # fmt: skip
    return found


def serve(
    shape: str,
    requests: List[WorkloadRequest],
    *,
    policy: str | None = None,
    admission: str = "none",
    single: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Outcome:
    """Serve a workload.

    Args:
      policy: None: KVCache-centric, and for coupled instances least loaded.
      settings: of the conductor.
    """
    default = "least_loaded" if "M" in shape else "kvcache_centric"
    config = ConductorConfig(
        policy=policy or default,
        admission=admission,
        **{"ttft": TTFT, "tpot": TPOT, "seed": seed, **settings},  # type: ignore[arg-type]
    )
    record = ClusterSimulation(instances(shape, single), config).run(requests, seed)
    return Outcome.of(record, len(requests))
