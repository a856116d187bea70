"""Logs as text or JSON: one line for each request that has ended, and everything else that the library logs.

Prompts and answers are not logged unless that is asked for.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from longctx.serving.request.output import Output
from longctx.serving.request.request import Request
from longctx.serving.server.settings import LogFormat


class LogFormatter(logging.Formatter):
    """Formatter of a record, with the fields of its argument `extra={"fields": ...}`, as one line.

    The line is JSON, or text with `name=value`, where values with a space or control character are JSON.
    """

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._is_json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        time_, level, fields = _utc(record.created), record.levelname.lower(), getattr(record, "fields", {})
        exception = self.formatException(record.exc_info) if record.exc_info else None
        if self._is_json:
            line = {"time": time_, "level": level, "logger": record.name, "message": record.getMessage(), **fields}
            return json.dumps(line if exception is None else line | {"exception": exception}, default=str)
        shown = [f"{name}={_shown(value)}" for name, value in fields.items()]
        text = " ".join([time_, level, record.name, record.getMessage(), *shown])
        return text if exception is None else f"{text}\n{exception}"


def install(form: LogFormat, stream: TextIO) -> Callable[[], None]:
    """Send the library's log to a stream; return what undoes that."""
    logger, handler = logging.getLogger("longctx"), logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter(form))
    logger.addHandler(handler)

    def uninstall() -> None:
        logger.removeHandler(handler)
        handler.close()

    return uninstall


@contextlib.contextmanager
def shown(name: str, form: LogFormat | None, is_quiet: bool = False) -> Iterator[None]:
    """Send one log to standard error, as text, unless a format is given, by which all are sent there."""
    if form is not None or is_quiet:
        yield
        return
    logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("text"))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


class RequestLog:
    """Logs a request when the last of its completions has ended, to the logger `longctx.requests`."""

    def __init__(self, shows_prompts: bool = False) -> None:
        self._shows_prompts = shows_prompts
        self._outputs: dict[str, list[Output]] = {}
        self._logger = logging.getLogger("longctx.requests")
        self._logger.setLevel(logging.INFO)

    def note(self, output: Output, request: Request) -> None:
        """Note a completion that has ended."""
        outputs = self._outputs.setdefault(output.request_id, [])
        outputs.append(output)
        if len(outputs) == request.sampling.n:
            del self._outputs[output.request_id]
            fields = request_fields(outputs, request)
            if self._shows_prompts:
                prompt = request.prompt
                fields["prompt"] = prompt if isinstance(prompt, str) else list(map(int, prompt))
                fields["answers"] = [{"tokens": x.token_ids, "text": x.text} for x in outputs]
            self._logger.info("request", extra={"fields": fields})


def request_fields(outputs: list[Output], request: Request) -> dict[str, Any]:
    """Return the log's fields of a request, without its prompt; durations are seconds."""
    outputs.sort(key=lambda output: output.index)
    each, first = [output.metrics for output in outputs], outputs[0].metrics
    reasons = list(dict.fromkeys(output.finish_reason for output in outputs))
    ttft = min((x.ttft for x in each if x.ttft is not None), default=None)
    tpots = [x.tpot for x in each if x.tpot is not None]
    ends = [x.finished for x in each if x.finished is not None]
    fields: dict[str, Any] = {
        "id": outputs[0].request_id,
        "reason": ",".join(reasons),
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": max(x.cached_tokens for x in each),
        "output_tokens": sum(x.output_tokens for x in each),
        "queue": None if first.admitted is None else round(first.admitted - first.arrival, 6),
        "ttft": None if ttft is None else round(ttft, 6),
        "tpot": round(sum(tpots) / len(tpots), 6) if tpots else None,
        "seconds": round(max(ends) - first.arrival, 6) if ends else None,
    }
    optional: dict[str, Any] = {
        "tenant": request.tenant,
        "n": len(outputs) if len(outputs) > 1 else 0,
        "preemptions": sum(x.preemptions for x in each),
        "error": next((output.error for output in outputs if output.error), None),
    }
    return fields | {name: value for name, value in optional.items() if value}


class AuditLog:
    """Log of administrative actions, refusals and failed authentication: lines of JSON, written by a thread of its own.

    Each kind of event has `LINES` lines a minute, after which it is counted: so a flood of one hides no other, and the
    log grows by a bounded amount. The next line of that kind has the number of those left out. JSON escapes what could
    end a line, and values are cut at `LONGEST` characters.

    Args:
      path: of a file, which is made for this user alone, and opened again where it was moved; `-`: standard error.
        None: nothing is written.

    Raises:
      ValueError: the file can't be opened.
    """

    LINES, LONGEST = 300, 256

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._begun: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._has_failed = False
        self._worker = ThreadPoolExecutor(1, "longctx-audit")
        if path is not None:
            try:
                self._append("")
            except OSError as error:
                raise ValueError(f"audit_log: {path} can't be written: {error.strerror}") from None

    def write(self, event: str, **fields: object) -> None:
        """Write a line, with those fields that are not None; it never waits, and never raises."""
        if self._path is None:
            return
        now, left_out = self._clock(), 0
        if now - self._begun.get(event, -60.0) >= 60:
            left_out = max(0, self._counts.get(event, 0) - self.LINES)
            self._begun[event], self._counts[event] = now, 0
        self._counts[event] += 1
        if self._counts[event] <= self.LINES:
            self._submit(event, fields | {"left_out": left_out or None})

    def close(self) -> None:
        """Write what is left, with the numbers of lines that were left out."""
        for event, count in self._counts.items():
            if count > self.LINES:
                self._submit(event, {"left_out": count - self.LINES})
        self._worker.shutdown()

    def _submit(self, event: str, fields: dict[str, object]) -> None:
        line: dict[str, object] = {"time": _utc(time.time()), "event": event}
        for name, value in fields.items():
            if value is not None:
                line[name] = value[: self.LONGEST] if isinstance(value, str) else value
        self._worker.submit(self._write, json.dumps(line) + "\n")

    def _write(self, text: str) -> None:
        try:
            self._append(text)
        except OSError as error:
            if not self._has_failed:
                logging.getLogger(__name__).error("longctx: the audit log can't be written: %s", error.strerror)
            self._has_failed = True
        else:
            self._has_failed = False

    def _append(self, text: str) -> None:
        assert self._path is not None
        if str(self._path) == "-":
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(self._path, flags, 0o600), "a", encoding="ascii") as file:
            file.write(text)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03}Z"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return json.dumps(text) if not text.isprintable() or " " in text or '"' in text else text
