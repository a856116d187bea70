"""The same run in virtual time: the same conductor and trace over simulated servers."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longctx.cluster.conductor.config import ConductorConfig
from longctx.models.config import LlamaConfig
from longctx.serving import EngineConfig
from longctx.serving.predictor.runtime import RuntimePredictor
from longctx.simulation.cluster import ClusterInstance, ClusterRecord, ClusterSettings, ClusterSimulation
from longctx.simulation.workloads import WorkloadRequest

BANDWIDTH = 1e9  # bytes per second from one server to another over loopback, `python -m benchmarks.transfer`


def slowed(predictor: RuntimePredictor, factor: float) -> RuntimePredictor:
    """A predictor of a device that takes `factor` times as long."""
    programs = tuple(
        dataclasses.replace(
            each,
            fixed=factor * each.fixed,
            per_key=tuple(factor * x for x in each.per_key),
            per_sample=factor * each.per_sample,
        )
        for each in predictor.programs
    )
    return dataclasses.replace(predictor, programs=programs)


def simulate(
    requests: Sequence[WorkloadRequest],
    roles: Mapping[str, str],
    factors: Mapping[str, float],
    conductor: ConductorConfig,
    model: LlamaConfig,
    engine: EngineConfig,
    predictor: RuntimePredictor,
) -> ClusterRecord:
    """Serve a trace in virtual time.

    Args:
      roles: of instances, by their names.
      factors: how many times what the predictor says a step of an instance takes.
    """
    instances = [
        ClusterInstance(name, role, model, engine, slowed(predictor, factors[name]), bandwidth=BANDWIDTH)  # type: ignore[arg-type]
        for name, role in roles.items()
    ]
    settings = ClusterSettings(overlap="chunk", report_seconds=0.25)
    return ClusterSimulation(instances, conductor, settings).run(list(requests))


def ttft_of(record: ClusterRecord) -> dict[int, float]:
    """Seconds to the first token, by the requests' numbers."""
    return {each.number: each.ttft for each in record.served}


def compare(measured: Mapping[int, float], simulated: Mapping[int, float], beside: float) -> dict[str, Any]:
    """Simulated beside measured TTFT.

    Args:
      beside: seconds that a request takes beside engines and links: HTTP, tokens, the router.
    """
    numbers = sorted(measured.keys() & simulated.keys())
    real = np.array([measured[number] for number in numbers])
    ours = np.array([simulated[number] + beside for number in numbers])
    found = {"requests": len(numbers), "beside": beside, "measured": float(real.mean()), "simulated": float(ours.mean())}
    found["error"] = found["simulated"] / found["measured"] - 1
    for share in (50, 90, 99):
        found[f"error_p{share}"] = float(np.percentile(ours, share) / np.percentile(real, share) - 1)
    found["correlation"] = float(np.corrcoef(real, ours)[0, 1])
    return found


def seconds_beside(measured: Mapping[int, float], simulated: Mapping[int, float]) -> float:
    """What requests that come one by one take beside what is simulated, the median."""
    return statistics.median(measured[number] - simulated[number] for number in measured)
