"""Whether every request was answered once, with the tokens that one engine by itself gives."""

import asyncio
import dataclasses
from collections.abc import Sequence

from benchmarks.cluster.client import Answer, run_clients
from longctx.simulation.workloads import WorkloadRequest

AT_A_TIME = 4


def reference(url: str, requests: Sequence[WorkloadRequest], seed: int, model: str) -> list[list[int]]:
    """The greedy answers of one server, which computes all: a salt of their own hides from it what it has cached."""
    found: list[list[int]] = [[] for _ in requests]
    queue = list(enumerate(requests))[::-1]

    async def worker() -> None:
        while queue:
            at, request = queue.pop()
            [answer] = await run_clients(
                url, [dataclasses.replace(request, arrival=0.0)], seed, model, cache_salt="reference"
            )
            if answer.finish is None:
                raise RuntimeError(f"the reference has no answer: {answer.failures}")
            found[at] = answer.tokens

    async def all_workers() -> None:
        await asyncio.gather(*(worker() for _ in range(AT_A_TIME)))

    asyncio.run(all_workers())
    return found


def wrong_answers(
    answers: Sequence[Answer], requests: Sequence[WorkloadRequest], expected: Sequence[Sequence[int]]
) -> list[str]:
    """A sentence for each request that was not answered once and rightly."""
    wrong = []
    for answer, request, tokens in zip(answers, requests, expected, strict=True):
        name = f"request {request.number}"
        if answer.finish is None:
            wrong.append(f"{name} was not answered: {answer.failures}")
            continue
        if answer.finish != "length" or len(answer.tokens) != request.output_tokens or answer.repeated:
            told = f"{len(answer.tokens)} of {request.output_tokens} tokens, {answer.finish}, {answer.repeated} more"
            wrong.append(f"{name} was answered with {told}")
        if answer.tokens != list(tokens):
            pairs = zip(answer.tokens, tokens, strict=False)
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(answer.tokens), len(tokens)))
            wrong.append(f"{name} has other tokens than one engine by itself from token {same} on")
    return wrong
