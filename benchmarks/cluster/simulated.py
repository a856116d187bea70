"""The same run in virtual time: the same conductor and trace over simulated servers."""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.arms import engine_config
from benchmarks.cluster.runs import WARM_UP
from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models.builtin import TINY
from longctx.models.checkpoint import read_model
from longctx.serving.predictor import RuntimePredictor
from longctx.serving.predictor.file import read_profile
from longctx.simulation import HostTimes, Record, Simulation
from longctx.simulation.cluster import ClusterInstance, ClusterSettings
from longctx.simulation.workloads import WorkloadRequest

BANDWIDTH = 1e9  # bytes per second from one server to another over loopback, `python -m benchmarks.transfer`


def slowed(predictor: RuntimePredictor, factor: float) -> RuntimePredictor:
    """A predictor of a device that takes `factor` times as long."""
    programs = tuple(
        dataclasses.replace(
            each,
            fixed=factor * each.fixed,
            per_bucket=tuple(tuple(factor * x for x in costs) for costs in each.per_bucket),
            per_key=tuple(factor * x for x in each.per_key),
            per_sample=factor * each.per_sample,
        )
        for each in predictor.programs
    )
    return dataclasses.replace(predictor, programs=programs)


class Prediction:
    """The simulator's words on runs of one trace.

    Args:
      roles: of servers, by their names.
      folder: with what `measure` found of a server that had a core for itself.
    """

    def __init__(self, requests: Sequence[WorkloadRequest], roles: Mapping[str, str], folder: Path) -> None:
        self._requests, self._roles, self._engine = list(requests), roles, engine_config()
        self._model = read_model(TINY)[0].config
        self._predictor, _ = read_profile(folder / "profile.json")
        self._host = HostTimes(**json.loads((folder / "host.json").read_text()))

    def beside(self, policy: str, run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Simulated TTFT beside that of a run, see `benchmarks.cluster.runs.run`."""
        same = dict.fromkeys(self._roles, 1.0)
        alone = ttft_of(self._run(policy, WARM_UP, same))
        seconds = statistics.median(run["alone"][number] - alone[number] for number in alone)
        first = self._run(policy, self._requests, same)
        found = {}
        for kind in ("profile", "measured"):
            factors = same if kind == "profile" else self._factors(run, first)
            record = first if kind == "profile" else self._run(policy, self._requests, factors)
            found[kind] = compare(run["each"], ttft_of(record), seconds)
            found[kind] |= {"hit_rate": record.hit_rate, "factors": factors}
        return found

    def _factors(self, run: Mapping[str, Any], record: Record) -> dict[str, float]:
        """How much longer steps took than in a simulation: of each token of a prompt, and of each step of decodes."""
        totals = {each.name: each.totals for each in record.instances}
        factors = {}
        for role, count in (("prefill", "computed"), ("decode", "steps")):
            names = [name for name, of in self._roles.items() if of == role]
            real = [run["instances"][name] for name in names]
            measured = sum(each["step_seconds"] for each in real) / sum(each[count] for each in real)
            number = sum(totals[name].rows if role == "prefill" else totals[name].steps for name in names)
            factors[role] = measured * number / sum(totals[name].busy for name in names)
        return {name: factors[role] for name, role in self._roles.items()}

    def _run(self, policy: str, requests: Sequence[WorkloadRequest], factors: Mapping[str, float]) -> Record:
        instances = [
            ClusterInstance(
                name=name,
                role=role,  # type: ignore[arg-type]
                model=self._model,
                config=self._engine,
                predictor=slowed(self._predictor, factors[name]),
                bandwidth=BANDWIDTH,
                host=self._host,
            )
            for name, role in self._roles.items()
        ]
        settings = ClusterSettings(overlap="chunk", report_seconds=0.25, first_token="decode")
        config = ConductorConfig(policy=policy, admission="none", defer_seconds=120.0)
        return Simulation(instances, Conductor(config, PrefixIndex()), settings).run(list(requests), keep_steps=False)


def ttft_of(record: Record) -> dict[int, float]:
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
    found = {"requests": len(numbers), "beside": beside}
    found |= {"measured": float(real.mean()), "simulated": float(ours.mean())}
    found["error"] = found["simulated"] / found["measured"] - 1
    for share in (50, 90, 99):
        found[f"error_p{share}"] = float(np.percentile(ours, share) / np.percentile(real, share) - 1)
    found["correlation"] = float(np.corrcoef(real, ours)[0, 1])
    return found
