"""The same run in virtual time: the same conductor and trace over simulated servers."""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.cluster.arms import engine_config, roles_of
from benchmarks.cluster.runs import ALONE, WARM_UP
from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models.builtin import TINY
from longctx.models.checkpoint import read_model
from longctx.serving.predictor.file import read_profile
from longctx.simulation import HostTimes, Record, Simulation
from longctx.simulation.cluster import ClusterInstance, ClusterSettings, ServerTimes
from longctx.simulation.workloads import WorkloadRequest

BANDWIDTH = 1e9  # bytes per second from one server to another over loopback, `python -m benchmarks.transfer`
REPORT = 0.25  # seconds between two looks of the router at each server


class Prediction:
    """The simulator's words on runs of one trace.

    Args:
      roles: of servers, by their names.
      cores: that they are pinned to, by their names.
      folder: with what `measure` found of a server that had a core for itself.
    """

    def __init__(
        self, requests: Sequence[WorkloadRequest], roles: Mapping[str, str], cores: Mapping[str, int], folder: Path
    ) -> None:
        self._requests, self._roles, self._cores, self._engine = list(requests), roles, cores, engine_config()
        self._model = read_model(TINY)[0].config
        self._predictor, _ = read_profile(folder / "profile.json")
        self._host = HostTimes(**json.loads((folder / "host.json").read_text()))

    def beside(self, arm: str, run: Mapping[str, Any]) -> dict[str, Any]:
        """Simulated TTFT beside that of a run, see `benchmarks.cluster.runs.run`."""
        policy, roles = arm.partition(", ")[0], roles_of(arm, self._roles)
        times = dict[str, ServerTimes]()
        for _ in range(2):  # steps have more decodes at a time where they take longer
            times = self._server_times(policy, run, roles, times)
        alone, ttft = run["alone"]["short"]["ttft"], ttft_of(self._run(policy, roles, WARM_UP, times))
        record = self._run(policy, roles, self._requests, times)
        beside = statistics.median(alone[number] - ttft[number] for number in ttft)
        found = compare(run["each"], ttft_of(record), beside) | {"hit_rate": record.hit_rate}
        return found | {"times": {name: dataclasses.asdict(each) for name, each in times.items()}}

    def _server_times(
        self,
        policy: str,
        run: Mapping[str, Any],
        roles: Mapping[str, str],
        times: Mapping[str, ServerTimes],
    ) -> dict[str, ServerTimes]:
        """Fit, for each role and for the router with its clients, what requests and tokens take beside steps.

        The seconds of processors are those of requests one by one, with short answers and with long ones, and of the
        run, less those of its steps by prediction.
        """
        phases = {name: (run["alone"][name], ALONE[name]) for name in ("short", "long")} | {
            "run": (run, self._requests)
        }
        steps = {
            phase: {
                each.name: each.totals.stage_seconds for each in self._run(policy, roles, requests, times).instances
            }
            for phase, (_, requests) in phases.items()
        }
        idle, found = run["alone"]["idle"], dict[str, ServerTimes]()
        [router] = idle["cpu"].keys() - roles.keys()
        for role in (*dict.fromkeys(roles.values()), "router"):
            names = [router] if role == "router" else [name for name in roles if roles[name] == role]
            rate = sum(idle["cpu"][name] for name in names) / idle["seconds"]
            used, counts = [], []
            for phase, (measured, requests) in phases.items():
                cpu = measured["cpu"] | ({} if phase == "run" else {"client": measured["client"]})
                seconds = sum(cpu[name] - steps[phase].get(name, 0.0) for name in names) - rate * measured["seconds"]
                used.append(seconds + (cpu["client"] if role == "router" else 0.0))
                tokens = 0 if role == "prefill" else sum(each.output_tokens for each in requests)
                counts.append((len(requests), tokens))
            request, token = nnls(np.array(counts, float), np.array(used))[0].tolist()
            report = REPORT * rate / (len(roles) if role == "router" else len(names))
            found[role] = ServerTimes(request, token=token, report=report)
        return found

    def _run(
        self,
        policy: str,
        roles: Mapping[str, str],
        requests: Sequence[WorkloadRequest],
        times: Mapping[str, ServerTimes] = MappingProxyType({}),
    ) -> Record:
        """Serve requests; they have a token more than letters, that of the beginning."""
        none = ServerTimes()
        instances = [
            ClusterInstance(
                name=name,
                role=role,  # type: ignore[arg-type]
                model=self._model,
                config=self._engine,
                predictor=self._predictor,
                bandwidth=BANDWIDTH,
                host=self._host,
                core=str(self._cores[name]),
                server=times.get(role, none),
            )
            for name, role in roles.items()
        ]
        settings = ClusterSettings(overlap="end", report_seconds=REPORT, router=times.get("router", none))
        config = ConductorConfig(policy=policy, admission="none", defer_seconds=120.0)
        rows = [dataclasses.replace(each, prompt_tokens=each.prompt_tokens + 1) for each in requests]
        return Simulation(instances, Conductor(config, PrefixIndex()), settings).run(rows, keep_steps=False)


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
