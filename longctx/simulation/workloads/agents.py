"""Sessions of coding agents: public traces in the format that AIPerf replays, and sessions with their statistics."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longctx.models.validation import MAX_INT32, check_integer, check_real, shown
from longctx.simulation.workloads.lengths import Quantiles
from longctx.simulation.workloads.request import MAX_ARRIVAL, WorkloadRequest

AGENT_BLOCK = 64
"""Tokens of a block of agents' traces."""

_NEAR = 64  # requests after one, among which is the next turn of the same agent


class _Recorded(NamedTuple):
    """A recorded request, in seconds from the beginning of its session."""

    begun: float
    ended: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class AgentTraces:
    """Sessions of agents that are read one after another, as requests with numbers and block ids of their own.

    A session is a JSON object with `requests`: each has `t` (seconds from its beginning), `in` and `out` (tokens),
    `hash_ids` (one for each block of `block_size` tokens) and optionally `api_time` (seconds until its answer's end) or
    `think_time` (seconds from the end of the one before). An entry of type `subagent` has `requests` of its own, whose
    `t` count from the session's beginning or from the entry's. Block ids are of the session alone, unless its
    `hash_id_scope` is `global`.

    A request follows the one that ended last before it began, as long after its end as recorded: agents wait for
    answers and for subagents, and those that ran side by side do so again. The blocks of a turn go on over its answer
    where the next turn has it.

    Source:
      AIPerf's documentation of agentic traces, which are those of kv-cache-tester.

    Examples:
      >>> from longctx.simulation.workloads.agents import AgentTraces
      >>> turns = [{"t": 0.0, "in": 100, "out": 20, "hash_ids": [1, 2], "api_time": 2.0}]
      >>> turns += [{"t": 5.0, "in": 150, "out": 9, "hash_ids": [1, 3, 4], "api_time": 1.0}]
      >>> requests = AgentTraces().read({"id": "a", "block_size": 64, "requests": turns})
      >>> [(request.prompt_tokens, request.blocks, request.after, request.delay) for request in requests]
      [(100, (0, 1), None, 0.0), (150, (0, 2, 3), 0, 3.0)]
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[object, int, int], int] = {}
        self._count = self._sessions = 0

    def read(self, session: Mapping[str, Any]) -> list[WorkloadRequest]:
        """Return the requests of a session.

        Raises:
          TypeError, ValueError: it has another form; the message names the field.
        """
        self._sessions += 1
        name = str(session.get("id") or f"session-{self._sessions}")
        size = check_integer("block_size", session.get("block_size", AGENT_BLOCK), 1, MAX_INT32)
        scope = None if session.get("hash_id_scope") == "global" else self._sessions
        found = sorted(_flatten(_list("requests", session), 0.0), key=lambda each: each.begun)
        if not found:
            raise ValueError(f"requests must have some, got none in session {name!r}")
        first, requests = self._count, list[WorkloadRequest]()
        for at, recorded in enumerate(found):
            fields: dict[str, Any] = {"arrival": recorded.begun}
            # Of those that have ended, the last one; a session begins with what follows none.
            before = max(
                (i for i in range(at) if found[i].ended <= recorded.begun), key=lambda i: found[i].ended, default=None
            )
            if before is not None:
                delay = recorded.begun - found[before].ended
                fields = {"arrival": requests[before].arrival, "after": first + before, "delay": delay}
            blocks = tuple(
                self._blocks.setdefault((scope, size, block), len(self._blocks))
                for block in _with_answer(found, at, size)
            )
            requests.append(
                WorkloadRequest(
                    prompt_tokens=recorded.prompt_tokens,
                    output_tokens=recorded.output_tokens,
                    blocks=blocks,
                    block_size=size,
                    number=first + at,
                    session=name,
                    **fields,
                )
            )
        self._count += len(found)
        return requests


def _flatten(entries: Iterable[Any], offset: float) -> Iterator[_Recorded]:
    """Yield the requests of a session and of its subagents."""
    end = offset
    for entry in entries:
        if not isinstance(entry, dict):
            raise TypeError(f"requests must be objects, got {shown(entry)}")
        begun = offset + check_real("t", entry.get("t"), 0, MAX_ARRIVAL)
        if entry.get("type") == "subagent":
            inner = _list("requests", entry)
            is_absolute = all(isinstance(x, dict) and x.get("t", 0) >= entry["t"] for x in inner)
            yield from _flatten(inner, offset if is_absolute else begun)
            continue
        if "api_time" in entry:
            ended = begun + check_real("api_time", entry["api_time"], 0, MAX_ARRIVAL)
        else:
            if "think_time" in entry:  # the one before ended so long before this one
                begun = max(end, begun - check_real("think_time", entry["think_time"], 0, MAX_ARRIVAL))
            ended = begun
        end = ended
        output = check_integer("out", entry.get("out"), 0, MAX_INT32)
        prompt = check_integer("in", entry.get("in"), 1, MAX_INT32)
        blocks = tuple(check_integer("hash_ids", block, 0) for block in _list("hash_ids", entry, ()))
        yield _Recorded(begun, ended, prompt, max(1, output), blocks)


def _list(name: str, values: Mapping[str, Any], default: Any = None) -> Any:
    found = values.get(name, default)
    if not isinstance(found, list | tuple):
        raise TypeError(f"{name!r} must be a list, got {shown(found)}")
    return found


def _with_answer(found: List[_Recorded], at: int, size: int) -> tuple[int, ...]:
    """Return the blocks of a request, and those of its answer if a later request has them."""
    own = found[at]
    whole = own.prompt_tokens // size
    if not 0 < whole <= len(own.blocks):
        return own.blocks
    for later in found[at + 1 : at + 1 + _NEAR]:
        if len(later.blocks) > whole and later.blocks[whole - 1] == own.blocks[whole - 1]:
            end = (own.prompt_tokens + own.output_tokens) // size
            return own.blocks[:whole] + later.blocks[whole:end] if end > whole else own.blocks
    return own.blocks


def read_agent_traces(path: Path, limit: int | None = None) -> list[WorkloadRequest]:
    """Read sessions of agents, see `AgentTraces`: all begin at 0, until `arrive_at_rate` says when.

    Args:
      path: a folder of `.json` files with a session each, or one such file.
      limit: the most requests to read, of the first sessions; None: all.

    Returns:
      The requests, sorted by arrival.

    Raises:
      OSError: a file can't be read.
      ValueError: a file has another form, and the message names it.
    """
    if limit is not None:
        check_integer("limit", limit, 1)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    traces, requests = AgentTraces(), list[WorkloadRequest]()
    for file in files:
        if limit is not None and len(requests) >= limit:
            break
        try:
            session = json.loads(file.read_text("utf-8-sig"))
            if not isinstance(session, dict):
                raise TypeError(f"a session must be an object, got {shown(session)}")
            requests += traces.read(session)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from None
    if not requests:
        raise ValueError(f"{path}: it has no sessions of agents (.json)")
    return sorted(requests[:limit], key=lambda request: request.arrival)


@dataclasses.dataclass(frozen=True)
class AgentStatistics:
    """Statistics of agents' sessions.

    Attributes:
      turns: of a session.
      first_prompt: tokens of a session's first prompt after the shared ones.
      new_tokens: of a later prompt, after all that was said before it: results of tools, and what users say.
      output: tokens of an answer.
      shared_tokens: of system prompt and tools, the same in all sessions.
      window: tokens of the longest prompt. A session that gets longer is compacted: it goes on with the shared tokens
        and a summary.
      summary: tokens of a summary.
      think: milliseconds from an answer's end to the next turn.

    Examples:
      >>> import dataclasses
      >>> from longctx.simulation.workloads import Quantiles, make_agent_sessions
      >>> from longctx.simulation.workloads.agents import CODING_AGENTS
      >>> short = dataclasses.replace(CODING_AGENTS, turns=Quantiles((0, 2), (1, 2)))
      >>> [request.after for request in make_agent_sessions(3, short)]
      [None, 0, None, 2, None, 4]
    """

    turns: Quantiles
    first_prompt: Quantiles
    new_tokens: Quantiles
    output: Quantiles
    shared_tokens: int
    window: int
    summary: Quantiles
    think: Quantiles


CODING_AGENTS = AgentStatistics(
    turns=Quantiles((0, 3), (0.25, 16), (0.5, 43), (0.75, 95), (1, 500)),
    first_prompt=Quantiles((0, 500), (0.3, 60_000), (1, 150_000)),
    new_tokens=Quantiles((0, 30), (0.5, 700), (0.9, 5_000), (1, 25_000)),
    output=Quantiles((0, 20), (0.5, 444), (0.9, 1_900), (1, 12_000)),
    shared_tokens=15_872,
    window=200_000,
    summary=Quantiles((0, 50_000), (1, 120_000)),
    think=Quantiles((0, 100), (0.6, 3_000), (0.9, 20_000), (1, 300_000)),
)
"""Coding agents.

Source:
  Public traces of coding agents as AIPerf replays them: medians of 43 turns, 142,000 tokens in and 444 out, more than
  96 % found in an unlimited cache; 12,400 to 13,000 tokens of tools and 2,700 to 4,300 of the system prompt. Spreads,
  summaries and times between turns are assumptions that give these.
"""


def make_agent_sessions(
    num_sessions: int, statistics: AgentStatistics = CODING_AGENTS, seed: int = 0
) -> list[WorkloadRequest]:
    """Draw sessions of agents, which all begin at 0; each later turn follows the one before it.

    Args:
      num_sessions: how many.
      statistics: of what is drawn.
      seed: of what is drawn.

    Returns:
      The turns of the first session, then those of the next; `arrive_at_rate` says when sessions begin.

    Raises:
      TypeError, ValueError: no session is asked for.

    Examples:
      >>> import statistics
      >>> from longctx.simulation.workloads import ideal_hit_rate, make_agent_sessions
      >>> requests = make_agent_sessions(100)
      >>> round(statistics.median(request.prompt_tokens for request in requests), -4), ideal_hit_rate(requests) > 0.96
      (140000.0, True)
    """
    check_integer("num_sessions", num_sessions, 1)
    known = statistics
    rng = np.random.default_rng(seed)
    shared = known.shared_tokens // AGENT_BLOCK
    requests, next_block = list[WorkloadRequest](), shared
    for session, count in enumerate(known.turns.draw(rng, num_sessions).tolist()):
        new, outputs = known.new_tokens.draw(rng, count).tolist(), known.output.draw(rng, count).tolist()
        thinks = known.think.draw(rng, count).tolist()
        length, chain = known.shared_tokens, list(range(shared))
        new[0] = int(known.first_prompt.draw(rng, 1)[0])
        for turn, (more, output, think) in enumerate(zip(new, outputs, thinks, strict=True)):
            if length + more > known.window:
                length, chain = known.shared_tokens + int(known.summary.draw(rng, 1)[0]), chain[:shared]
            length += more
            added = -(-(length + output) // AGENT_BLOCK) - len(chain)
            chain += range(next_block, next_block + added)
            next_block += added
            number = len(requests)
            follows: dict[str, Any] = {"after": number - 1, "delay": think / 1000} if turn else {}
            requests.append(
                WorkloadRequest(
                    0.0, length, output, tuple(chain), AGENT_BLOCK, number, session=f"agent-{session}", **follows
                )
            )
            length += output
    return requests


def ideal_hit_rate(requests: List[WorkloadRequest]) -> float:
    """Return the share of the prompts' tokens that an unlimited cache has, of requests that come one after another.

    Whole blocks are found, and never a prompt's last token.

    Args:
      requests: in order of their numbers.

    Returns:
      0 to 1.

    Examples:
      >>> from longctx.simulation.workloads import WorkloadRequest, ideal_hit_rate
      >>> first = WorkloadRequest(0.0, 1000, 24, blocks=(0, 1), block_size=512)
      >>> turn = WorkloadRequest(0.0, 1500, 24, blocks=(0, 1, 2), block_size=512, number=1, after=0)
      >>> ideal_hit_rate([first, turn])  # 1,024 of 2,500 tokens
      0.4096
    """
    known, found, total = set[tuple[int, int]](), 0, 0
    for request in sorted(requests, key=lambda request: request.number):
        size, count = request.block_size, 0
        for block in request.blocks[: (request.prompt_tokens - 1) // size if size else 0]:
            if (size, block) not in known:
                break
            count += 1
        found, total = found + count * size, total + request.prompt_tokens
        whole = (request.prompt_tokens + request.output_tokens) // size if size else 0
        known.update((size, block) for block in request.blocks[:whole])
    return found / max(1, total)
