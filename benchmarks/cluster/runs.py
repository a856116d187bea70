"""One run: a router, the trace, and what came of it."""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.cluster.arms import Instance
from benchmarks.cluster.client import LETTERS, Answer, figures, run_clients
from benchmarks.cluster.processes import Process
from benchmarks.server_process import cpu_seconds
from longctx.simulation.workloads import WorkloadRequest

WARM_UP = 12  # requests, so that connections are there


def run(
    router: Process, instances: Sequence[Instance], requests: Sequence[WorkloadRequest], seed: int
) -> tuple[dict[str, Any], list[Answer]]:
    """The trace once, through a router that is ready: figures, and all answers."""
    model = httpx.get(f"{router.url}/v1/models", timeout=10).json()["data"][0]["id"]
    warm_up = [WorkloadRequest(0.2 * number, 200 + 100 * number, 4, number=number) for number in range(WARM_UP)]
    failed = [
        x.failures for x in asyncio.run(run_clients(router.url, warm_up, LETTERS, seed + 10_000, model)) if x.failures
    ]
    if failed:
        raise RuntimeError(f"{router.name} answers nothing: {failed[0]}; {router.tail()}")
    wait_until_idle(instances)
    processes = [router, *(instance.process for instance in instances)]
    cpu, computed = [cpu_seconds(x.pid) for x in processes], [x.computed for x in instances]
    own = sum(os.times()[:2])
    answers = asyncio.run(run_clients(router.url, requests, LETTERS, seed, model))
    own = sum(os.times()[:2]) - own
    wait_until_idle(instances)
    computed = [x.computed - before for x, before in zip(instances, computed, strict=True)]
    cpu = [cpu_seconds(x.pid) - before for x, before in zip(processes, cpu, strict=True)]
    prompts = sum(request.prompt_tokens for request in requests)
    found: dict[str, Any] = figures(answers)
    found["hit_rate"] = 1 - sum(computed) / prompts
    found["computed"] = {x.name: tokens for x, tokens in zip(instances, computed, strict=True)}
    found["cpu"] = {x.name: seconds for x, seconds in zip(processes, cpu, strict=True)} | {"client": own}
    found["failures"] = [failure for answer in answers for failure in answer.failures]
    return found, answers


def wait_until_idle(instances: Sequence[Instance], seconds: float = 30.0) -> None:
    """Until no living server has a request; and its metrics say so."""
    deadline = time.monotonic() + seconds
    while any(x.process.is_alive and x.process.get("/load")["num_reqs"] for x in instances):
        if time.monotonic() > deadline:
            raise RuntimeError("the servers are not idle: " + str([x.process.get("/load") for x in instances]))
        time.sleep(0.1)
    time.sleep(0.5)
