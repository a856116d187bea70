"""Small clusters and workloads of the tests."""

from typing import Any

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models import LlamaConfig
from longctx.parallel.device_tables import Device
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.predictor.roofline import roofline
from longctx.simulation import Record, Simulation
from longctx.simulation.cluster import Change, ClusterInstance, ClusterSettings
from longctx.simulation.workloads import WorkloadRequest

MODEL = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=50_000)
PREDICTOR = roofline(MODEL, Topology(Device("plain A100", {"bfloat16": 312e12}, 2e12), {}), 512, overhead=1e-3)
PAGE = 64
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
SIZES: dict[str, Any] = {"page_size": PAGE, "max_running": 8, "token_budget": 512, "policy": "fcfs", "run_ahead": 1}


def prefill(name: str, host_pages: int = 1000, **options: Any) -> ClusterInstance:
    tiers = TierConfig(host_bytes=host_pages * PAGE * TOKEN_BYTES) if host_pages else None
    config = EngineConfig(**({"num_pages": 500, "tiers": tiers} | SIZES | options.pop("config", {})))
    return ClusterInstance(name, "prefill", MODEL, config, PREDICTOR, **options)


def decode(name: str, **options: Any) -> ClusterInstance:
    config = EngineConfig(**({"num_pages": 500, "prefix_cache": False} | SIZES | options.pop("config", {})))
    return ClusterInstance(name, "decode", MODEL, config, PREDICTOR, **options)


def coupled(name: str, **options: Any) -> ClusterInstance:
    config = EngineConfig(**({"num_pages": 500} | SIZES | options.pop("config", {})))
    return ClusterInstance(name, "both", MODEL, config, PREDICTOR, is_patient=True, **options)


def two_and_two() -> list[ClusterInstance]:
    return [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")]


def workload(count: int, rate: float = 5.0, seed: int = 0, longest: int = 3000) -> list[WorkloadRequest]:
    """Requests of which many begin alike."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    found = []
    for number, at in enumerate(times):
        blocks = int(rng.integers(0, longest // PAGE))
        topic = int(rng.integers(0, 3))
        shared = int(rng.integers(0, blocks + 1))
        ids = tuple(1000 * topic + i for i in range(shared)) + tuple(
            10**6 * (number + 1) + i for i in range(shared, blocks)
        )
        prompt = max(1, blocks * PAGE - int(rng.integers(0, PAGE)))
        found.append(WorkloadRequest(at, prompt, int(rng.integers(1, 60)), ids, PAGE, number))
    return found


def serve(
    instances: list[ClusterInstance],
    requests: list[WorkloadRequest],
    changes: list[Change] | None = None,
    settings: ClusterSettings | None = None,
    seed: int = 0,
    **config: Any,
) -> Record:
    config = {"admission": "none", "ttft": 30.0, "tpot": 0.1, "is_inline": False} | config
    conductor = Conductor(ConductorConfig(**config), PrefixIndex())
    return Simulation(instances, conductor, settings, changes or []).run(requests, seed)


def check_each_once(record: Record, requests: list[WorkloadRequest]) -> None:
    """Every request is served whole, rejected or open, and in one way alone."""
    ended = [each.number for each in record.served], [each.number for each in record.rejected]
    numbers = sorted([*ended[0], *ended[1], *(each.number for each in record.open)])
    assert numbers == sorted(each.number for each in requests)
    of_number = {each.number: each for each in requests}
    for served, placed in zip(record.served, record.placed, strict=True):
        request, metrics = of_number[served.number], served.metrics
        assert metrics.output_tokens == request.output_tokens
        assert metrics.prompt_tokens == request.prompt_tokens
        assert metrics.arrival <= metrics.first_token <= metrics.last_token == metrics.finished
        assert placed.assignment.decode == served.instance
        assert metrics.cached_tokens < request.prompt_tokens
        if request.output_tokens > 1:
            assert 0 < placed.tbt <= metrics.longest_gap + 1e-9
