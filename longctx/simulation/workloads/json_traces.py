"""JSON lines: prompts, Mooncake's traces, and AIPerf's conversations."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from longctx.serving.validation import check_integer, check_text, shown
from longctx.simulation.workloads.request import TRACE_BLOCK, WorkloadRequest
from longctx.simulation.workloads.rows import BadRowError, Row

_MAX_BLOCK = (1 << 64) - 1
# Blocks of conversations have ids from here on, each a span of its own; hardly a trace has any of these.
_OWN_BLOCKS, _SPAN = 1 << 62, 1 << 24
_LONGEST = 1 << 26  # tokens of a conversation, each turn of which has the ids of all blocks before it


def read_json_lines(file: Iterable[str]) -> Iterator[WorkloadRequest]:
    """The requests of a file of JSON objects, one a line, in its order.

    Raises:
      BadRowError: a line has another form.
    """
    sessions: dict[str, _Session] = {}
    lines = ((at, line) for at, line in enumerate(file, 1) if line.strip())
    for number, (at, line) in enumerate(lines):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRowError(at, str(error)) from None
        if not isinstance(values, dict):
            raise BadRowError(at, f"must be a JSON object, got {line.strip()[:40]}")
        row = Row(at, values)
        request = _prompt(row, number) if "prompt" in values else _lengths(row, number)
        yield _turn(row, request, sessions) if "session_id" in row else request


def _prompt(row: Row, number: int) -> WorkloadRequest:
    prompt = row.value("prompt")
    try:
        if isinstance(prompt, list):
            prompt = tuple(check_integer("prompt", token, 0) for token in prompt)
        elif not isinstance(prompt, str):
            raise TypeError(f"prompt must be text or a list of token ids, got {shown(prompt)}")
        else:
            check_text("prompt", prompt)
        if not prompt:
            raise ValueError("prompt must not be empty")
    except (TypeError, ValueError) as error:
        raise row.bad(error) from None
    request = row.request(row.seconds("timestamp", 1e-3), len(prompt), row.tokens("max_tokens"), number)
    return dataclasses.replace(request, prompt=prompt)


def _lengths(row: Row, number: int) -> WorkloadRequest:
    request = row.request(
        row.seconds("timestamp", 1e-3), row.tokens("input_length"), row.tokens("output_length"), number
    )
    blocks: Any = row.value("hash_ids") if "hash_ids" in row else []
    try:
        if not isinstance(blocks, list):
            raise TypeError(f"hash_ids must be a list of integers, got {shown(blocks)}")
        return dataclasses.replace(request, blocks=tuple(check_integer("hash_ids", x, 0, _MAX_BLOCK) for x in blocks))
    except (TypeError, ValueError) as error:
        raise row.bad(error) from None


@dataclasses.dataclass
class _Session:
    """A conversation: its last turn, and the id of its first block that no other conversation has."""

    first_block: int
    turn: WorkloadRequest


def _turn(row: Row, request: WorkloadRequest, sessions: dict[str, _Session]) -> WorkloadRequest:
    """A turn of a conversation, whose prompt begins with what was said before."""
    if request.prompt is not None:
        raise row.bad("session_id needs input_length: a prompt does not say what was said before it")
    value = row.value("session_id")
    if not isinstance(value, str | int):
        raise row.bad(f"session_id must be a string or an integer, got {shown(value)}")
    name, delay = str(value), row.seconds("delay", 1e-3)
    session, fields = sessions.get(name), dict[str, Any]()
    if session is None:
        # What the first prompt's blocks don't fill, other conversations can't have.
        chain, prompt = request.blocks[: request.prompt_tokens // TRACE_BLOCK], request.prompt_tokens
        session = sessions[name] = _Session(_OWN_BLOCKS + _SPAN * len(sessions), request)
    else:
        before = session.turn
        chain, prompt = before.blocks, before.length + request.prompt_tokens
        if "delay" in row or "timestamp" not in row:
            fields = {"after": before.number, "delay": delay, "arrival": before.arrival}
    if prompt > _LONGEST:
        raise row.bad(f"a conversation must have at most {_LONGEST:,} tokens, {shown(name)} has {prompt:,}")
    # They go on over the answer, with which the next prompt begins.
    blocks = -(-(prompt + request.output_tokens) // TRACE_BLOCK)
    chain += tuple(session.first_block + at for at in range(len(chain), blocks))
    try:
        session.turn = dataclasses.replace(request, prompt_tokens=prompt, blocks=chain, session=name, **fields)
    except (TypeError, ValueError) as error:
        raise row.bad(error) from None
    return session.turn
