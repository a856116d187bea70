"""`longctx bench --url`: send a workload to a server over HTTP, and measure what its clients see."""

import argparse
import asyncio
from typing import Any

from longctx.cli import command_parser
from longctx.cli.flags import flag, prefixing
from longctx.cli.terminal import FAILED, Console, interrupts, report_error
from longctx.cli.workload import keep_fitting, loop_users, print_results, read_requests, write_json
from longctx.models.builtin import TINY
from longctx.models.validation import MAX_INT32
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.scheduler.slo import Slo
from longctx.simulation.capacity import latency
from longctx.simulation.http_replay import HttpRecord, find_model, make_http_client, replay_http
from longctx.simulation.reports import plots, report


def check_flags(options: argparse.Namespace) -> None:
    """Check that no flag is of an engine in this process; ValueError names it."""
    usual = command_parser("bench").parse_args([])
    own = [each.name for settings in (EngineConfig, ParallelPlan, Slo) for each in options.fields[settings].values()]
    for name in (*own, "dtype", "preset", "topology", "profile", "coordinator"):
        if name != "max_length" and getattr(options, name) != getattr(usual, name):
            raise ValueError(f"{flag(name)} contradicts --url: the server has an engine of its own")


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that flags name."""
    check_flags(options)
    record, console = HttpRecord(), Console(options.quiet)
    requests = read_requests(options)
    found: dict[str, Any] = {}
    is_complete = False
    interrupts.leave_to_python()
    try:
        asyncio.run(_measure(options, requests, record, console, found))
        is_complete = True
    finally:
        if found:
            _report(options, record, found | {"interrupted": not is_complete})
    if record.failed:
        return report_error(f"failed: {record.failed} of {found['requests']} requests", FAILED)
    return 0


async def _measure(
    options: argparse.Namespace, requests: list[Any], record: HttpRecord, console: Console, found: dict[str, Any]
) -> None:
    async with make_http_client(options.url, options.api_key) as client:
        with prefixing("--url: "):
            name, longest = await find_model(client)
        if options.model != TINY:
            name = str(options.model)
        requests, num_skipped = keep_fitting(requests, options, longest or MAX_INT32)
        requests = loop_users(requests, options)
        found |= {"model": name, "skipped": num_skipped, "requests": len(requests)}
        with console.bar(total=len(requests), desc="requests", unit="req") as ended:

            def show(record: HttpRecord) -> None:
                ended.update(len(record.served) + record.failed - ended.n)

            await replay_http(client, name, requests, options.seed, show, record)


def _report(options: argparse.Namespace, record: HttpRecord, found: dict[str, Any]) -> None:
    ends = [value for served in record.served if (value := latency(served, "e2e")) is not None]
    summary = report.summarize(record) | {
        "e2e": report.percentiles(ends),
        "errors": dict(record.errors.most_common()),
        "first_error": record.first_error,
        "without_usage": record.without_usage,
        "without_cached": record.without_cached,
        "not_sent": record.not_sent,
        "skipped": found["skipped"],
        "interrupted": found["interrupted"],
    }
    write_json(options, {"url": options.url, "model": found["model"]}, record, summary)
    print_results(options, summary, lambda: plots.draw_record(record))
