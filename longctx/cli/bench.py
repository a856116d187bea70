"""`longctx bench`: serve a workload on the engine, and measure how it was served."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from longctx.cli import bench_url
from longctx.cli.engine import EngineLoader, initialize_processes, show_compiling
from longctx.cli.flags import refuse
from longctx.cli.settings import engine_config
from longctx.cli.terminal import FAILED, Console, interrupts, report_error
from longctx.cli.workload import check_workload, make_workload, print_results, write_json
from longctx.serving import Engine, EngineStats
from longctx.serving.distributed import ProcessGroup
from longctx.simulation.record import Record
from longctx.simulation.replay import replay
from longctx.simulation.reports import plots, report
from longctx.simulation.workloads import WorkloadRequest


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that flags name."""
    check_workload(options)
    if options.url is not None:
        return bench_url.run(options)
    refuse(options, ("api_key",), "needs --url")
    engine_config(options, max_length=options.max_length)
    with initialize_processes(options) as group:
        return _run(options, group)


def _run(options: argparse.Namespace, group: ProcessGroup) -> int:
    loader = EngineLoader(options, group)
    console, options.model = loader.console, loader.path
    requests, num_skipped = make_workload(options, loader.model.config)
    longest = max(request.length for request in requests)
    config = engine_config(options, max_length=options.max_length or longest, seed=options.seed)
    loader.check_memory(config, least_pages=-(-(longest - 1) // config.page_size))

    record = Record()
    engine = loader.load(config, monitor=record.steps.append)
    if not group.is_first:
        engine.follow()
        return 0

    show_compiling(engine.warm_up, console, engine)
    is_complete = False
    interrupts.leave_to_python()
    try:
        _replay(engine, requests, options.seed, record, console)
        is_complete = True
    finally:  # what was measured until an interrupt or a failure is kept
        summary = report.summarize(record) | {"skipped": num_skipped, "interrupted": not is_complete}
        write_json(options, _settings(options, engine), record, summary)
    print_results(options, summary, lambda: plots.draw_record(record))
    if record.failed:
        return report_error(f"failed: {record.failed} of {len(requests)} requests", FAILED)
    return 0


def _settings(options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    config = dataclasses.asdict(engine.config)
    del config["hash_key"]
    return {"model": str(options.model), "config": config, "plan": dataclasses.asdict(engine.plan)}


def _replay(engine: Engine, requests: Sequence[WorkloadRequest], seed: int, record: Record, console: Console) -> None:
    """Replay with progress bars of ended requests, and of tokens computed, found in the cache and generated."""
    total = sum(request.length for request in requests)
    with (
        console.bar(total=len(requests), desc="requests", unit="req", position=0) as ended,
        console.bar(total=total, desc="tokens", unit="tok", unit_scale=True, position=1) as tokens,
    ):

        def progress(record: Record, stats: EngineStats) -> None:
            done = stats.prompt_tokens + stats.cached_tokens + stats.output_tokens
            ended.update(len(record.served) - ended.n)
            tokens.update(max(0, min(done, total) - tokens.n))  # a preempted request is prefilled twice

        replay(engine, requests, time.monotonic, seed=seed, progress=progress, record=record)
