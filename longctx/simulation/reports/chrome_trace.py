"""A simulated workload as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

Source: the Trace Event Format: complete events (X), counters (C), nestable async events (b, e) and metadata (M).
"""

import json
from collections.abc import Iterator
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

from longctx.simulation.record import Record, Served, merge_timelines
from longctx.simulation.reports.stage_trace import StageTrace, Tick

_REQUESTS = 0  # process of requests, of all instances; instances come after it


def write_chrome_trace(record: Record, traces: List[StageTrace], path: Path) -> None:
    """Write a trace: a process for each instance with a thread for each stage, and one with all requests.

    Stages have a slice for each batch; counters have pages by rank, and running and waiting requests; each request has
    slices of its queue, prefill and decode.

    Args:
      traces: of each instance, in the record's order, with all ticks.

    Raises:
      OSError: the file can't be written.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        comma = ""
        for event in _events(record, traces):
            file.write(comma + json.dumps(event, separators=(",", ":")))
            comma = ",\n"
        file.write("\n]}\n")


def _events(record: Record, traces: List[StageTrace]) -> Iterator[dict[str, Any]]:
    yield _named("process_name", "requests", _REQUESTS)
    for served in record.served:
        yield from _request(served)
    timelines = [[(load.time, load.running, load.waiting) for load in trace.loads.values] for trace in traces]
    for seconds, running, waiting in merge_timelines(timelines):
        yield _counter("requests", seconds, {"running": running, "waiting": waiting}, _REQUESTS)
    for process, (instance, trace) in enumerate(zip(record.instances, traces, strict=True), 1):
        yield _named("process_name", f"instance {instance.name}", process)
        for stage in range(trace.num_stages):
            yield _named("thread_name", f"stage {stage}", process, stage + 1)
        for tick in trace.ticks:
            yield from _tick(tick, process)
        before: tuple[int, ...] = ()
        for load in trace.loads.values:
            if load.pages != before:
                held = {f"rank {rank}": count for rank, count in enumerate(load.pages)}
                yield _counter("pages", load.time, held, process)
            before = load.pages


def _tick(tick: Tick, process: int) -> Iterator[dict[str, Any]]:
    for stage, batch in enumerate(tick.stages):
        if batch is not None:
            parts = [f"{batch.decodes} decodes"] * bool(batch.decodes)
            parts += [f"{batch.prompt_tokens} prompt tokens"] * bool(batch.prompt_tokens)
            yield {
                "name": ", ".join(parts),
                "cat": "batch",
                "ph": "X",
                "ts": _microseconds(tick.start),
                "dur": _microseconds(batch.seconds),
                "pid": process,
                "tid": stage + 1,
                "args": {"batch": batch.batch, "tick_seconds": tick.seconds},
            }


def _request(served: Served) -> Iterator[dict[str, Any]]:
    metrics = served.metrics
    assert metrics.admitted is not None
    assert metrics.finished is not None
    assert metrics.first_token is not None
    start = metrics.first_token - served.ttft
    about = {
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "output_tokens": metrics.output_tokens,
        "ttft": served.ttft,
        "tpot": served.tpot,
        "instance": served.instance,
    }
    spans = [
        ("request", start, metrics.finished, about),
        ("queue", start, metrics.admitted, {}),
        ("prefill", metrics.admitted, metrics.first_token, {}),
        ("decode", metrics.first_token, metrics.finished, {}),
    ]
    for name, begin, end, arguments in spans:
        common = {"name": name, "cat": "request", "id": served.number, "pid": _REQUESTS, "tid": 0}
        yield common | {"ph": "b", "ts": _microseconds(begin), "args": arguments}
        yield common | {"ph": "e", "ts": _microseconds(end)}


def _named(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _counter(name: str, seconds: float, values: dict[str, int], process: int) -> dict[str, Any]:
    return {"name": name, "ph": "C", "ts": _microseconds(seconds), "pid": process, "tid": 0, "args": values}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
