"""Servers that are killed and drained in mid-run, and a router that is killed: who loses what."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from benchmarks.cluster.arms import Instance
from benchmarks.cluster.client import LETTERS, Answer, figures, run_clients
from benchmarks.cluster.processes import Process
from benchmarks.cluster.runs import run_once
from longctx.simulation.workloads import WorkloadRequest

RETRIES = 240  # a client tries for a minute


class Timeline:
    """What happens in a run, and when it did."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.events: list[dict[str, Any]] = []

    def note(self, what: str, who: str, **more: Any) -> None:
        self.events.append({"at": round(time.perf_counter() - self.begin, 2), "what": what, "who": who} | more)

    def kill_and_restart(self, instance: Instance) -> None:
        """SIGKILL; it comes back, with nothing, at the address that it had."""
        held = instance.process.get("/load")["num_reqs"]
        instance.process.kill()
        self.note("killed", instance.name, requests=held)
        instance.process.start()
        instance.process.wait_until_ready()
        self.note("ready again", instance.name)

    def drain(self, instance: Instance, drain: bool = True) -> None:
        sent = httpx.post(f"{instance.process.url}/drain", json={"drain": drain}, headers=ADMIN, timeout=10)
        sent.raise_for_status()
        self.note("drained" if drain else "restored", instance.name, requests=sent.json()["requests"])

    def kill_router(self, router: Process) -> None:
        router.kill()
        self.note("killed", "router")
        router.start()
        router.wait_until_ready()
        self.note("ready again", "router")
