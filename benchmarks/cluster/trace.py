"""Conversations and agents' sessions, so small that four servers on one machine can bear them."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from longctx.simulation.workloads import (
    Quantiles,
    WorkloadRequest,
    arrive_at_rate,
    make_agent_sessions,
    read_workload,
    scale_lengths,
)
from longctx.simulation.workloads.agents import CODING_AGENTS

BLOCK = 512
PAGE = 64  # tokens of a block of the scaled trace: a page of the servers


def scaled_trace(
    path: Path | None, count: int = 200, seconds: float = 40.0, seed: int = 4, longest: int = 16_000
) -> list[WorkloadRequest]:
    """A sample of a trace's conversations, all lengths an eighth and time shrunk.

    Whole conversations are drawn, so that prompts share as much with earlier ones as in the whole trace. With seed 4,
    200 requests of Mooncake's `conversation_trace.jsonl` have 36.6 % of their tokens in common with earlier ones, as
    all 12,031 have.

    Args:
      path: JSON lines with `hash_ids`, as Mooncake's; None: conversations with similar statistics are made up.
      seconds: from the first arrival to the last.
      longest: conversations with longer prompts, in tokens after scaling, are left out.

    Returns:
      `count` requests, numbered in the order of their arrivals.
    """
    rng = np.random.default_rng(seed)
    requests = made_up(20 * count, seed) if path is None else read_workload(path)
    conversations: dict[int, list[WorkloadRequest]] = {}
    for request in requests:
        # The first block is the system prompt, which all share; the second one tells conversations apart.
        conversations.setdefault(request.blocks[min(1, len(request.blocks) - 1)], []).append(request)
    names = list(conversations)
    rng.shuffle(names)
    drawn: list[WorkloadRequest] = []
    for name in names:
        turns = conversations[name]
        is_short = max(turn.prompt_tokens for turn in turns) * PAGE <= longest * BLOCK
        if is_short and len(drawn) + len(turns) <= count:
            drawn += turns
    if len(drawn) < count:
        raise ValueError(f"the trace must have conversations for {count} requests, it has for {len(drawn)}")
    drawn = sorted(scale_lengths(drawn, PAGE / BLOCK), key=lambda request: request.arrival)
    begin, span = drawn[0].arrival, drawn[-1].arrival - drawn[0].arrival
    return [
        dataclasses.replace(request, number=number, arrival=seconds * (request.arrival - begin) / span)
        for number, request in enumerate(drawn)
    ]


def agent_sessions(count: int, seconds: float, seed: int = 4) -> list[WorkloadRequest]:
    """`count` turns of coding agents' sessions, of at most 20 turns each, which begin within `seconds`.

    All lengths are a sixteenth, and times between turns a tenth. A turn follows the answer to the one before.
    """
    drawn, sessions = [], 0
    while len(drawn) < count:
        sessions += 1
        drawn = short_agent_sessions(sessions, seed)
    return arrive_at_rate(scale_lengths(drawn[:count], 1 / 16), sessions / seconds, seed=seed)


def short_agent_sessions(sessions: int, seed: int = 0) -> list[WorkloadRequest]:
    """Sessions of coding agents with at most 20 turns, and a tenth of the time between these; all begin at 0."""
    known = dataclasses.replace(CODING_AGENTS, turns=Quantiles((0, 3), (0.5, 12), (1, 20)))
    drawn = make_agent_sessions(sessions, known, seed)
    return [dataclasses.replace(request, delay=request.delay / 10) for request in drawn]


def made_up(count: int, seed: int) -> list[WorkloadRequest]:
    """At least `count` requests of conversations like those of Mooncake's `conversation_trace.jsonl`, over an hour.

    Fitted to its 7,373 conversations: they have 1.6 turns in the mean (Zipf with exponent 2.6, at most 43); first
    prompts are log-normal with median 5,264 tokens and 90th percentile 25,559; turns come a median of 123 s after each
    other and add a median of 455 tokens; answers have a median of 350. All begin with one block.
    """
    rng = np.random.default_rng(seed)
    found: list[WorkloadRequest] = []
    next_block = 1
    while len(found) < count:
        turns = min(int(rng.zipf(2.6)), 43)
        arrival, length = float(rng.uniform(0, 3600)), _log_normal(rng, 5_264, 1.23)
        for _ in range(turns):
            blocks = (0, *range(next_block, next_block + max(1, -(-length // BLOCK) - 1)))
            found.append(WorkloadRequest(arrival, length, _log_normal(rng, 350, 0.42), blocks, number=len(found)))
            arrival += float(rng.lognormal(np.log(123), 1.06))
            length = min(length + _log_normal(rng, 455, 1.8), 120_000)
        next_block += 1_000
    return found


def _log_normal(rng: np.random.Generator, median: float, sigma: float) -> int:
    return min(max(1, int(rng.lognormal(np.log(median), sigma))), 100_000)


def reusable(requests: Iterable[WorkloadRequest]) -> float:
    """The share of all prompts' tokens that one endless cache would have when they come."""
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        known = next((i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        found += min(known * request.block_size, request.prompt_tokens)
        total += request.prompt_tokens
        seen.update(request.blocks)
    return found / total
