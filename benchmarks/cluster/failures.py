"""Servers that are killed and drained in mid-run, and a router that is killed: who loses what."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from benchmarks.cluster.arms import Instance
from benchmarks.cluster.client import Answer, figures, run_clients
from benchmarks.cluster.runs import model_of, wait_until_idle, warm_up
from benchmarks.server_process import Process
from longctx.simulation.workloads import WorkloadRequest

RETRIES = 240  # with the pause between them, a minute


class Timeline:
    """What happened in a run, and when."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.events: list[dict[str, Any]] = []

    def note(self, what: str, who: str, **more: Any) -> None:
        self.events.append({"at": round(time.perf_counter() - self.begin, 2), "what": what, "who": who} | more)

    def kill(self, instance: Instance) -> None:
        """SIGKILL; it comes back, with nothing, at the address that it had."""
        held = instance.process.get("/load")["num_reqs"]
        instance.process.kill()
        self.note("killed", instance.name, requests=held)
        instance.process.start()
        instance.process.wait_until_ready()
        self.note("ready again", instance.name)

    def drain(self, instance: Instance, drain: bool = True) -> None:
        answer = httpx.post(f"{instance.process.url}/drain", json={"drain": drain}, timeout=10)
        answer.raise_for_status()
        self.note("drained" if drain else "restored", instance.name, requests=answer.json()["requests"])

    def kill_router(self, router: Process) -> None:
        """SIGKILL; it is started again at once."""
        router.kill()
        self.note("killed", "router")
        router.start()
        router.wait_until_ready()
        self.note("ready again", "router")


def run_failures(
    router: Process, instances: Sequence[Instance], requests: Sequence[WorkloadRequest], seed: int
) -> tuple[dict[str, Any], list[Answer]]:
    """A decode server is drained, then a prefill server and the other decode server are killed; clients never retry.

    The drained one gets requests again before anybody is killed. Those that were killed are started again at once.
    """
    by_name = {instance.name: instance for instance in instances}
    span = requests[-1].arrival
    timeline = Timeline()
    at = {
        0.1 * span: lambda: timeline.drain(by_name["decode-0"]),
        0.3 * span: lambda: timeline.drain(by_name["decode-0"], False),
        0.4 * span: lambda: timeline.kill(by_name["prefill-1"]),
        0.6 * span: lambda: timeline.kill(by_name["decode-1"]),
    }
    return _run(router, instances, requests, seed, timeline, at, retries=0)


def run_router_death(
    router: Process, instances: Sequence[Instance], requests: Sequence[WorkloadRequest], seed: int
) -> tuple[dict[str, Any], list[Answer]]:
    """The router is killed and started again. Streams of its clients break: these ask again until they are answered."""
    timeline = Timeline()
    at = {0.4 * requests[-1].arrival: lambda: timeline.kill_router(router)}
    return _run(router, instances, requests, seed, timeline, at, retries=RETRIES)


def _run(
    router: Process,
    instances: Sequence[Instance],
    requests: Sequence[WorkloadRequest],
    seed: int,
    timeline: Timeline,
    at: dict[float, Callable[[], None]],
    retries: int,
) -> tuple[dict[str, Any], list[Answer]]:
    model = model_of(router)
    warm_up(router, seed, model)
    timeline.begin = time.perf_counter()
    answers = asyncio.run(run_clients(router.url, requests, seed, model, retries, at))
    wait_until_idle(instances)
    found: dict[str, Any] = figures(answers)
    gaps = [b - a for answer in answers for a, b in itertools.pairwise(answer.times)]
    found["longest_gap"] = max(gaps)
    found["events"] = sorted(timeline.events, key=lambda event: float(event["at"]))
    found["retried"] = sum(bool(answer.failures) for answer in answers)
    found["failures"] = [failure for answer in answers for failure in answer.failures][:20]
    return found, answers
