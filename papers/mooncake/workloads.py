"""Mooncake's workloads: the data sets of its table 1, and its public conversation trace.

Lengths of table 1 are means; how they spread is not said. Here prompts and answers are log-normal around those means,
with the spreads that `DATASETS` states.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np

from longctx.simulation.workloads import (
    TRACE_BLOCK,
    Quantiles,
    WorkloadRequest,
    arrive_at_rate,
    jitter_arrivals,
    read_workload,
)
from papers.figures.figure import Inputs

TRACE, SYNTHETIC = "mooncake/conversation_trace.jsonl", "mooncake/synthetic_trace.jsonl"
PAPER_RATE = 23_000 * 7_955 / 3_600  # prompt tokens a second of the paper's real data, if it came in an hour
TICK = 3.0  # seconds between the trace's timestamps: bursts that were none
_BUILTIN = 12_031, 3_537.0  # requests and seconds of the built-in trace: those of the public one
_QUICK = 40  # requests of quick figures


class Dataset(NamedTuple):
    """Requests of one kind (table 1).

    Attributes:
      prompt, output: mean tokens.
      reuse: the table's share of prompt tokens that are cached.
      prompt_spread, output_spread: standard deviation of the lengths' logarithms; 0: all are as long.
      questions: requests that ask about one document, which is the prompt but for its last 128 tokens; 1: none is
        asked about twice.
      prefixes: how many first halves of prompts there are, one of which every prompt begins with; 0: none is shared.
    """

    prompt: int
    output: int
    reuse: float
    prompt_spread: float
    output_spread: float
    questions: int = 1
    prefixes: int = 0


QUESTION = 128  # tokens after a document
# L-Eval: 6 questions a document, as a reuse of more than 80 % needs more than 5.
DATASETS = {
    "arxiv": Dataset(8_088, 229, 0.0, 0.5, 0.4),
    "l-eval": Dataset(19_019, 72, 0.8, 0.5, 1.0, questions=6),
    **{f"simulated-{k}k": Dataset(k * 1024, 512, 0.5, 0.0, 0.0, prefixes=4) for k in (16, 32, 64, 128)},
}


def dataset(name: str, count: int, seed: int = 0) -> list[WorkloadRequest]:
    """Make `count` requests of a data set, in random order, which all arrive at 0."""
    about, rng = DATASETS[name], np.random.default_rng(seed)
    documents = about.prefixes or math.ceil(count / about.questions)
    tokens = _lengths(rng, about.prompt, about.prompt_spread, documents)
    asked = rng.permutation(np.resize(np.arange(documents), count))
    outputs = _lengths(rng, about.output, about.output_spread, count)
    shared = tokens // 2 if about.prefixes else tokens - QUESTION if about.questions > 1 else np.zeros_like(tokens)
    blocks = shared // TRACE_BLOCK
    first = np.concatenate([[0], np.cumsum(blocks)])
    return [
        WorkloadRequest(
            0.0, int(tokens[of]), int(outputs[number]), tuple(range(first[of], first[of] + blocks[of])), number=number
        )
        for number, of in enumerate(asked.tolist())
    ]


def poisson(inputs: Inputs, name: str, rate: float, count: int) -> list[WorkloadRequest]:
    """A data set whose requests arrive as a Poisson process; the same ones at all rates."""
    count = min(count, _QUICK // 2) if inputs.quick else count
    return arrive_at_rate(dataset(name, count, inputs.seed), rate, inputs.seed)


def _lengths(rng: np.random.Generator, mean: int, spread: float, count: int) -> np.ndarray:
    """Log-normal lengths with that mean, in expectation; none is above 6 times it, or below 4 tokens."""
    drawn = np.exp(rng.normal(-(spread**2) / 2, spread, count)) * mean
    return np.clip(np.rint(drawn), 4, 6 * mean).astype(int)


@functools.cache
def conversation(inputs: Inputs, speed: float = 1.0) -> list[WorkloadRequest]:
    """The public conversation trace, or without the data folder a built-in one of its shape; arrivals are jittered.

    Args:
      speed: by which it is replayed faster.
    """
    file = inputs.file(TRACE)
    found = builtin_trace(*_BUILTIN, inputs.seed) if file is None else read_workload(file)
    if inputs.quick:
        found = found[:_QUICK]
    return faster(jitter_arrivals(found, TICK, inputs.seed), speed)


def faster(requests: List[WorkloadRequest], speed: float) -> list[WorkloadRequest]:
    """Requests that come at `speed` times the rate."""
    return [dataclasses.replace(request, arrival=request.arrival / speed) for request in requests]


def repeat(requests: List[WorkloadRequest], times: int) -> list[WorkloadRequest]:
    """A workload several times at once, each with blocks and numbers of its own: more users who do alike.

    The copies begin evenly spread over the workload, and go round.
    """
    span = max(request.arrival for request in requests)
    blocks = 1 + max((max(request.blocks, default=0) for request in requests), default=0)
    copies = []
    for copy in range(times):
        for request in requests:
            arrival = (request.arrival + copy * span / times) % span if times > 1 else request.arrival
            ids = tuple(block + copy * blocks for block in request.blocks)
            number = request.number + copy * len(requests)
            copies.append(dataclasses.replace(request, arrival=arrival, blocks=ids, number=number))
    return sorted(copies, key=lambda request: request.arrival)


# Quantiles of the public conversation trace: first prompts of conversations, what later turns add, answers.
_FIRST = Quantiles((0, 891), (0.1, 905), (0.25, 1_336), (0.5, 5_264), (0.75, 13_056), (0.9, 25_560), (0.99, 89_868),
                   (1, 126_195))  # fmt: skip
_NEXT = Quantiles((0, 20), (0.1, 305), (0.5, 829), (0.9, 9_741), (1, 94_968))
_ANSWER = Quantiles((0, 1), (0.1, 24), (0.25, 157), (0.5, 350), (0.75, 472), (0.9, 597), (0.99, 1_119), (1, 2_000))
_TURNS = 0.50  # share of requests that go on with a conversation
_PAUSE = Quantiles((0, 20), (0.1, 42), (0.5, 123), (0.9, 483), (1, 1_800))  # seconds from turn to turn
_LONGEST = 126_195, 32_000  # tokens of the longest prompt, and of the longest that has a next turn


def builtin_trace(count: int, seconds: float, seed: int = 0) -> list[WorkloadRequest]:
    """Make conversations whose turns come in `seconds`, shaped as the public trace is: lengths, reuse, arrivals."""
    rng = np.random.default_rng(seed)
    first, later, answer = (each.draw(rng, count).tolist() for each in (_FIRST, _NEXT, _ANSWER))
    pauses = _PAUSE.draw(rng, count).tolist()
    begins, goes_on = np.sort(rng.uniform(0, seconds, count)).tolist(), rng.uniform(size=count).tolist()
    found: list[WorkloadRequest] = []
    waiting: list[tuple[float, WorkloadRequest]] = []  # when its next turn may come
    next_block = 1
    for number in range(count):
        now = begins[number]
        ready = [each for each in waiting if each[0] <= now] if goes_on[number] < _TURNS else []
        if ready:
            turn = ready[int(goes_on[number] / _TURNS * len(ready))]
            waiting.remove(turn)
            before, prompt = turn[1], min(turn[1].length + later[number], _LONGEST[0])
            chain = before.blocks[: before.prompt_tokens // TRACE_BLOCK]
        else:
            prompt, chain = first[number], (0,)  # of all conversations: a system prompt
        new = -(-prompt // TRACE_BLOCK) - len(chain)
        blocks = (*chain, *range(next_block, next_block + new))
        next_block += max(0, new)
        found.append(WorkloadRequest(now // TICK * TICK, prompt, answer[number], blocks, number=number))
        if prompt <= _LONGEST[1]:
            waiting = [*waiting[-600:], (now + pauses[number], found[-1])]
    return found


def token_rate(requests: List[WorkloadRequest]) -> float:
    """Tokens of prompts that come in a second."""
    return sum(request.prompt_tokens for request in requests) / max(request.arrival for request in requests)


def reuse(requests: List[WorkloadRequest], parts: int = 1) -> list[float]:
    """Shares `[parts]` of the prompts' tokens that earlier prompts have computed, with room for all and no wait.

    Args:
      parts: into which the requests are divided by their arrivals; each finds what it or any before it has computed.
    """
    ordered = sorted(requests, key=lambda request: request.arrival)
    seen, found = set[int](), []
    for part in np.array_split(np.arange(len(ordered)), parts):
        cached = tokens = 0
        for request in (ordered[at] for at in part.tolist()):
            known = next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
            cached += min(known * request.block_size, request.prompt_tokens)
            tokens += request.prompt_tokens
            seen.update(request.blocks)
        found.append(cached / tokens)
    return found
