"""One run: a router, the trace, and what came of it."""

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.cluster.arms import OURS, Instance, roles_of
from benchmarks.cluster.client import Answer, figures, run_clients
from benchmarks.server_process import Process, cpu_seconds
from benchmarks.usage import Usage
from longctx.simulation.workloads import WorkloadRequest

WARM_UP = [WorkloadRequest(0.4 * number, 200 + 100 * number, 4, number=number) for number in range(12)]
"""Requests one by one: they open connections, and say what a request takes that nobody else delays."""
ALONE = {
    "idle": [],
    "short": WARM_UP,
    "long": [WorkloadRequest(0.9 * number, 300 + 200 * number, 64, number=number) for number in range(6)],
}
"""Phases before a run, which tell what processes take for requests and for tokens; without requests it takes 4 s."""

COST = {
    "request": [WorkloadRequest(0.2 * number, 100, 1, number=number) for number in range(60)],
    "prompt": [WorkloadRequest(1.0 * number, 2000, 1, number=number) for number in range(30)],
    "stream": [WorkloadRequest(0.5 * number, 100, 100, number=number) for number in range(20)],
}
"""Requests by which it is measured what a router takes."""


def run(
    router: Process, instances: Sequence[Instance], requests: Sequence[WorkloadRequest], seed: int
) -> dict[str, Any]:
    """The trace once, through a router that is ready: figures, and TTFT of each request."""
    model = model_of(router)
    processes = [router, *(instance.process for instance in instances)]
    warm_up(router, seed, model)
    alone = {}
    for number, (phase, some) in enumerate(ALONE.items()):
        alone[phase] = measure_alone(router, instances, some, seed + 1_000 * (number + 1), model)
    cpu, before, own = [cpu_seconds(x.pid) for x in processes], [counts(x) for x in instances], sum(os.times()[:2])
    others = Usage()
    answers = asyncio.run(run_clients(router.url, requests, seed, model))
    found: dict[str, Any] = figures(answers)
    own = sum(os.times()[:2]) - own
    wait_until_idle(instances)
    found["cpu"] = {x.name: cpu_seconds(x.pid) - was for x, was in zip(processes, cpu, strict=True)} | {"client": own}
    found["others"] = max(0.0, others.others() - sum(found["cpu"].values()) / found["seconds"])
    deltas = [{key: now - was[key] for key, now in counts(x).items()} for x, was in zip(instances, before, strict=True)]
    computed = sum(each["computed"] for each in deltas)
    found["hit_rate"] = 1 - computed / sum(request.prompt_tokens for request in requests)
    found["instances"] = {x.name: each for x, each in zip(instances, deltas, strict=True)}
    found["parts"] = parts_of_ttft(router.name, instances, deltas, found["ttft"], len(requests))
    found["failures"] = [failure for answer in answers for failure in answer.failures]
    found["each"] = {answer.number: answer.ttft for answer in answers if answer.finish is not None}
    found["alone"] = alone
    return found


def model_of(router: Process) -> str:
    return str(httpx.get(f"{router.url}/v1/models", timeout=10).json()["data"][0]["id"])


def warm_up(router: Process, seed: int, model: str) -> list[Answer]:
    """Requests one by one, which open connections; RuntimeError if one is not answered."""
    answers = asyncio.run(run_clients(router.url, WARM_UP, seed + 10_000, model))
    failures = [failure for answer in answers for failure in answer.failures]
    if failures:
        raise RuntimeError(f"{router.name} answers nothing: {failures[0]}; {router.tail()}")
    return answers


def measure_alone(
    router: Process,
    instances: Sequence[Instance],
    requests: Sequence[WorkloadRequest],
    seed: int,
    model: str,
    idle: float = 4.0,
) -> dict[str, Any]:
    """What all processes take for requests that come one by one: seconds of processors, of steps, and TTFT.

    Without requests it takes `idle` seconds.
    """
    processes = [router, *(instance.process for instance in instances)]
    wait_until_idle(instances)
    begin, own, cpu = time.monotonic(), sum(os.times()[:2]), [cpu_seconds(x.pid) for x in processes]
    steps = [counts(x)["step_seconds"] for x in instances]
    answers = asyncio.run(run_clients(router.url, requests, seed, model)) if requests else []
    time.sleep(0.5 if requests else idle)
    return {
        "seconds": time.monotonic() - begin,
        "cpu": {x.name: cpu_seconds(x.pid) - was for x, was in zip(processes, cpu, strict=True)},
        "client": sum(os.times()[:2]) - own if requests else 0.0,
        "steps": {x.name: counts(x)["step_seconds"] - was for x, was in zip(instances, steps, strict=True)},
        "ttft": {answer.number: answer.ttft for answer in answers},
    }


def measure_cost(router: Process, instances: Sequence[Instance], seed: int) -> dict[str, float]:
    """CPU of a router that is ready.

    Returns:
      `idle`: seconds a second, without requests. Seconds for a `request` of 100 tokens that gets one token, for a
      `prompt` of 2,000 tokens, and for a `stream` of 100 tokens; what it takes by itself is taken off these.
    """
    model = model_of(router)
    warm_up(router, seed, model)
    alone = measure_alone(router, instances, [], seed, model, idle=20.0)
    found = {"idle": alone["cpu"][router.name] / alone["seconds"]}
    for number, (name, requests) in enumerate(COST.items()):
        one = measure_alone(router, instances, requests, seed + number + 1, model)
        found[name] = (one["cpu"][router.name] - found["idle"] * one["seconds"]) / len(requests)
    return found


def counts(instance: Instance) -> dict[str, float]:
    """What a server has done since it was started: tokens of prompts, steps and their seconds."""
    names = {
        "computed": "computed_prompt_tokens_total",
        "steps": "step_seconds_count",
        "step_seconds": "step_seconds_sum",
        "queue": "request_queue_time_seconds_sum",
        "prefill": "request_prefill_time_seconds_sum",
    }
    lines = httpx.get(f"{instance.process.url}/metrics", timeout=10).text.splitlines()

    def total(name: str) -> float:
        """Of a metric of ours, over its labels; 0 if it has no sample."""
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"longctx:{name}[ {{]", line))

    return {key: total(name) for key, name in names.items()}


def parts_of_ttft(
    arm: str, instances: Sequence[Instance], deltas: Sequence[Mapping[str, float]], ttft: float, num_requests: int
) -> dict[str, float]:
    """Mean seconds of a request before its first token, by where they pass.

    Returns:
      `queue`, `prefill`: until it has pages, then until its first token, where its prompt is read. `decode`: what the
      instance that decodes takes more, if it is another one; pages on their way are in it. `else`: what is left of
      TTFT: router, clients, and their waiting for a core.
    """
    roles = roles_of(arm, {instance.name: instance.role for instance in instances})
    found = {"queue": 0.0, "prefill": 0.0, "decode": 0.0}
    is_split = "prefill" in roles.values()
    for instance, each in zip(instances, deltas, strict=True):
        if is_split and roles[instance.name] != "prefill":
            found["decode"] += (each["queue"] + each["prefill"]) / num_requests
        else:
            found["queue"] += each["queue"] / num_requests
            found["prefill"] += each["prefill"] / num_requests
    if is_split and arm in OURS:  # one that decodes has the request from the beginning, others after the prefill
        found["decode"] -= found["queue"] + found["prefill"]
    return found | {"else": ttft - sum(found.values())}


def wait_until_idle(instances: Sequence[Instance], seconds: float = 30.0) -> None:
    """Until no living server has a request, and its metrics say so."""
    deadline = time.monotonic() + seconds
    while any(x.process.is_alive and x.process.get("/load")["num_reqs"] for x in instances):
        if time.monotonic() > deadline:
            raise RuntimeError("the servers are not idle: " + str([x.process.get("/load") for x in instances]))
        time.sleep(0.1)
    time.sleep(0.5)
