"""Readers of workload files: lists of lengths, and the traces that are public."""

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from longctx.models.validation import MAX_INT32, check_integer, check_real, shown
from longctx.serving.validation import check_text
from longctx.simulation.workloads.agents import AgentTraces, read_agent_traces
from longctx.simulation.workloads.request import MAX_ARRIVAL, TRACE_BLOCK, WorkloadRequest

_MAX_BLOCK = (1 << 64) - 1
# Blocks of conversations have ids from here on, each a span of its own; hardly a trace has any of these.
_OWN_BLOCKS, _SPAN = 1 << 62, 1 << 24
_LONGEST = 1 << 26  # tokens of a conversation, each turn of which has the ids of all blocks before it


def read_workload(path: Path, limit: int | None = None) -> list[WorkloadRequest]:
    """Read the first `limit` requests of a file, and sort them by arrival.

    A `.csv` file is known by its columns; others are ignored:

    - `num_prefill_tokens`, `num_decode_tokens`, and optionally `arrived_at` (seconds);
    - Azure's traces of LLM inference: `TIMESTAMP` (a date, or seconds), `ContextTokens`, `GeneratedTokens`; time begins
      with the first request;
    - BurstGPT: `Timestamp` (seconds), `Request tokens`, `Response tokens`; requests without a response had failed, and
      are left out.

    Any other file has a JSON object on each line, with `input_length`, `output_length` and optionally `hash_ids`
    (Mooncake: one for each 512 tokens, and for a last part), or with `prompt` (text or token ids) and `max_tokens`;
    both optionally with `timestamp` (milliseconds). A request without a time arrives at 0.

    Lines with `session_id` are turns of a conversation (AIPerf), in their order. Their `input_length` counts new
    tokens: the prompt is all prompts and answers before, and these. A turn comes `delay` milliseconds after the end of
    the one before, or at its `timestamp` if it has one and no `delay`. A first turn's `delay` means nothing.

    Lines with `requests` are sessions of agents (AIPerf's agentic traces), as are a `.json` file and each one of a
    folder: see `AgentTraces`.

    Args:
      path: `.csv`, JSON lines with any other suffix, a `.json` file of a session, or a folder of such.
      limit: the most requests to read; None: all.

    Returns:
      The requests, numbered in the file's order from 0.

    Raises:
      OSError: the file can't be read.
      ValueError: a row has another form, and the message names file, line and column; or the file has no requests.

    Source:
      Mooncake's open traces (1.2, and their repository), Azure's LLM inference traces, BurstGPT, AIPerf.

    Examples:
      >>> import pathlib, tempfile
      >>> from longctx.simulation.workloads import read_workload
      >>> line = '{"timestamp": 3000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}'
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "trace.jsonl")
      ...     _ = path.write_text(line)
      ...     [request] = read_workload(path)
      >>> request.arrival, request.prompt_tokens, request.blocks
      (3.0, 6955, (46, 47, 48))
    """
    if limit is not None:
        check_integer("limit", limit, 1)
    if path.is_dir() or (path.suffix.lower() == ".json" and _is_session(path)):
        return read_agent_traces(path, limit)
    requests: list[WorkloadRequest] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = _Lines(file)
        rows = read_csv(lines) if path.suffix.lower() == ".csv" else read_json_lines(lines)
        try:
            requests.extend(islice(rows, limit))
        except BadRowError as error:
            raise ValueError(f"{path}:{error.line}: {error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{lines.number + 1}: it is not UTF-8: {error.reason}") from None
        except csv.Error as error:
            raise ValueError(f"{path}:{lines.number}: {error}") from None
    if not requests:
        raise ValueError(f"{path}: it has no requests")
    return sorted(requests, key=lambda request: request.arrival)


def _is_session(path: Path) -> bool:
    """Whether a file is one JSON object with a session's requests, and not JSON lines."""
    try:
        found = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "requests" in found


class _Lines:
    """The lines of a file, counted."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.number = file, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.number += 1
            yield line


class BadRowError(Exception):
    """A row of another form; the text begins with the column."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class Row:
    """A line's values by column. Numbers may be text, as in a CSV file. Every error is a `BadRowError`."""

    def __init__(self, line: int, values: Mapping[str, Any]) -> None:
        self.line, self._values = line, values

    def __contains__(self, column: str) -> bool:
        return self._values.get(column) not in (None, "")

    def bad(self, message: object) -> BadRowError:
        return BadRowError(self.line, str(message))

    def value(self, column: str) -> Any:
        """Return a column's value as it is."""
        if self._values.get(column) is None:
            raise self.bad(f"{column!r} is missing")
        return self._values[column]

    def tokens(self, column: str, low: int = 1) -> int:
        """Return a column's number of tokens."""
        try:
            return check_integer(column, _number(self.value(column), int), low, MAX_INT32)
        except (TypeError, ValueError) as error:
            raise self.bad(error) from None

    def seconds(self, column: str, unit: float = 1.0) -> float:
        """Return a column's time, in units of `unit` seconds; 0 if it is missing."""
        if column not in self:
            return 0.0
        try:
            return check_real(column, _number(self.value(column), float), 0, MAX_ARRIVAL / unit) * unit
        except (TypeError, ValueError) as error:
            raise self.bad(error) from None

    def request(self, arrival: float, prompt_tokens: int, output_tokens: int, number: int) -> WorkloadRequest:
        try:
            return WorkloadRequest(arrival, prompt_tokens, output_tokens, number=number)
        except (TypeError, ValueError) as error:
            raise self.bad(error) from None


def _number(value: Any, kind: type) -> Any:
    """Return the number that a text has, else the value as it is, for a check to refuse."""
    try:
        return kind(value) if isinstance(value, str) else value
    except ValueError:
        return value


def read_csv(file: Iterable[str]) -> Iterator[WorkloadRequest]:
    """Read the requests of a CSV file, in its order; its columns say which of `_FORMS` it is.

    Raises:
      BadRowError: a row has another form.
    """
    csv.field_size_limit(MAX_INT32)
    rows = csv.DictReader(file)
    columns = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = columns
    form = max(_FORMS, key=lambda form: len({*form} & {*columns}))
    if missing := [name for name in form if name not in columns]:
        known = "; ".join(", ".join(form) for form in _FORMS)
        raise BadRowError(1, f"columns {', '.join(map(repr, missing))} are missing: a CSV file has one of {known}")
    number, times = 0, list[float]()
    for values in rows:
        request = _FORMS[form](Row(rows.line_num, values), number, times)
        if request is not None:
            yield request
            number += 1


def _csv_lengths(row: Row, number: int, times: list[float]) -> WorkloadRequest:
    prompt, output = row.tokens("num_prefill_tokens"), row.tokens("num_decode_tokens")
    return row.request(row.seconds("arrived_at"), prompt, output, number)


def _azure(row: Row, number: int, times: list[float]) -> WorkloadRequest:
    times.append(_timestamp(row))
    try:
        arrival = check_real("TIMESTAMP, less that of the first request,", times[-1] - times[0], 0, MAX_ARRIVAL)
    except ValueError as error:
        raise row.bad(error) from None
    return row.request(arrival, row.tokens("ContextTokens"), row.tokens("GeneratedTokens"), number)


def _timestamp(row: Row) -> float:
    text = row.value("TIMESTAMP").strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise row.bad(f"TIMESTAMP must be a date or seconds, got {shown(text)}") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _burst(row: Row, number: int, times: list[float]) -> WorkloadRequest | None:
    row.value("Timestamp")
    prompt, output = row.tokens("Request tokens", 0), row.tokens("Response tokens", 0)
    return row.request(row.seconds("Timestamp"), prompt, output, number) if prompt and output else None


_FORMS: dict[tuple[str, ...], Callable[[Row, int, list[float]], WorkloadRequest | None]] = {
    ("num_prefill_tokens", "num_decode_tokens"): _csv_lengths,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burst,
}


def read_json_lines(file: Iterable[str]) -> Iterator[WorkloadRequest]:
    """Read the requests of a file of JSON objects, one a line, in its order.

    Raises:
      BadRowError: a line has another form.
    """
    sessions: dict[str, _Session] = {}
    agents, num_agents = AgentTraces(), 0
    lines = ((at, line) for at, line in enumerate(file, 1) if line.strip())
    for number, (at, line) in enumerate(lines):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRowError(at, str(error)) from None
        if not isinstance(values, dict):
            raise BadRowError(at, f"must be a JSON object, got {line.strip()[:40]}")
        row = Row(at, values)
        if "requests" in values:
            try:
                turns = agents.read(values)
            except (TypeError, ValueError) as error:
                raise row.bad(error) from None
            num_agents += 1
            yield from turns
            continue
        if num_agents:
            raise row.bad("'requests' is missing: the lines before are sessions of agents")
        request = _prompt(row, number) if "prompt" in values else _json_lengths(row, number)
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


def _json_lengths(row: Row, number: int) -> WorkloadRequest:
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
