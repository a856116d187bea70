"""`longctx simulate`: serve a workload in virtual time, on devices that need not be there."""

import argparse
import dataclasses
import json
import math
import os
from typing import Any

from longctx.cli.flags import flag, prefixing
from longctx.cli.simulated import (
    apply_plan,
    check_simulation,
    make_deployment,
    make_requests,
    named_model,
    swept_flags,
    with_values,
)
from longctx.cli.terminal import Console
from longctx.cli.workload import check_folder, check_outputs, print_where, write_results
from longctx.simulation.capacity import Capacity, Target, Tried, find_capacity, parse_targets
from longctx.simulation.deployment import Deployment
from longctx.simulation.record import Record
from longctx.simulation.reports import chrome_trace, html_report, plots
from longctx.simulation.reports.report import summarize_deployment
from longctx.simulation.reports.stage_trace import StageTrace
from longctx.simulation.sweep import parse_grid, points, run_in_processes
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate

_SPAN = 20  # times a target's seconds, for which arrivals have to last until a queue that grows is seen


def run(options: argparse.Namespace) -> int:
    """Simulate, print tables, and write the files that flags name."""
    if options.cluster is not None:
        from longctx.cli.simulate_cluster import run_cluster

        run_cluster(options)
        return 0
    _check(options)
    console = Console(options.quiet)
    if options.sweep is not None:
        _sweep(options, console)
    else:
        _simulate(options, console)
    return 0


def _check(options: argparse.Namespace) -> None:
    check_simulation(options)
    apply_plan(options)
    check_outputs(options, "json", "plot", "trace")
    check_folder(options)
    if options.capacity is not None:
        _targets(options)
        for name in ("rate", "users", "window"):
            if getattr(options, name) is not None:
                raise ValueError(f"--capacity contradicts {flag(name)}: it searches a rate for all requests")
    if options.sweep is None and options.baseline is not None:
        for name in ("plot", "trace", "out"):
            if getattr(options, name) is not None:
                raise ValueError(f"{flag(name)} contradicts --baseline: it has no trace of stages and pages")
    if options.sweep is not None and options.trace is not None:
        raise ValueError("--trace contradicts --sweep: it is of one simulation")


def _targets(options: argparse.Namespace) -> list[Target]:
    with prefixing("--capacity "):
        return parse_targets(options.capacity)


def _make(options: argparse.Namespace) -> tuple[Deployment, list[WorkloadRequest], int]:
    requests, num_skipped = make_requests(options, named_model(options.model))
    return make_deployment(options, max(request.length for request in requests)), requests, num_skipped


def _simulate(options: argparse.Namespace, console: Console) -> None:
    deployment, requests, num_skipped = _make(options)
    found: dict[str, Any] = {}
    if options.capacity is not None:
        capacity = _search(options, deployment, requests, console)
        found["capacity"] = capacity._asdict()
        if not capacity.rate:
            print(
                f"capacity  none: {options.capacity} is not met at {min(x.rate for x in capacity.tried):.3g} requests/s"
            )
            return
        is_bounded = not all(tried.is_met for tried in capacity.tried)
        about = "" if is_bounded else ": no rate that was tried misses it, as the workload is too short"
        print(f"capacity  {capacity.rate:.4g} requests/s meet {options.capacity}{about}\n")
        _note_short(len(requests) / capacity.rate, _targets(options), console)
        requests = arrive_at_rate(requests, capacity.rate, options.seed)
    has_trace = any(getattr(options, name) is not None for name in ("plot", "trace", "out"))
    traces: list[StageTrace] | None = [] if has_trace else None
    until = math.inf if options.window is None else options.window
    with console.bar(total=len(requests), desc="requests", unit="req") as bar:

        def show(record: Record) -> None:  # what `update` returns would end the run
            bar.update(len(record.served) - bar.n)

        simulation = deployment.simulation(traces, keep_ticks=options.trace is not None)
        record = simulation.run(requests, options.seed, until, show, keep_steps=options.json is not None)
    summary = summarize_deployment(record, deployment) | {"skipped": num_skipped} | found
    settings = {
        "model": options.model,
        "topology": deployment.topology.to_dict(),
        "plan": dataclasses.asdict(deployment.plan),
        "instances": deployment.instances,
        "config": dataclasses.asdict(deployment.config) | {"num_pages": deployment.num_pages},
    }
    del settings["config"]["hash_key"]
    write_results(options, settings, record, summary, lambda: plots.draw_deployment(record, traces or []))
    if options.trace is not None:
        chrome_trace.write_chrome_trace(record, traces or [], options.trace)


def _search(
    options: argparse.Namespace, deployment: Deployment, requests: list[WorkloadRequest], console: Console
) -> Capacity:
    with console.bar(desc="rates", unit="rate") as bar:

        def progress(tried: Tried) -> None:
            bar.set_postfix_str(f"{tried.rate:.3g}/s {'met' if tried.is_met else 'missed'}")
            bar.update()

        return find_capacity(deployment, requests, _targets(options), options.seed, progress)


def _note_short(seconds: float, targets: list[Target], console: Console) -> None:
    """Say so if arrivals last little longer than what a queue may take by the targets."""
    longest = max((target.seconds for target in targets if target.name != "tpot"), default=0.0)
    if longest < math.inf and seconds < _SPAN * longest:
        console.note(f"note     requests arrive for {seconds:.3g} s: a longer workload would have a lower capacity")


def simulate_point(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate one point of a sweep: its `summary`, or the `error` that says why it can't be simulated."""
    try:
        check_simulation(options)
        deployment, requests, _ = _make(options)
        found: dict[str, Any] = {}
        if options.capacity is not None:
            capacity = find_capacity(deployment, requests, _targets(options), options.seed)
            found["capacity"] = capacity.rate
            if not capacity.rate:
                return {"error": f"{options.capacity} is met at no rate"}
            requests = arrive_at_rate(requests, capacity.rate, options.seed)
        until = math.inf if options.window is None else options.window
        record = deployment.simulation().run(requests, options.seed, until, keep_steps=False)
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    return {"summary": summarize_deployment(record, deployment) | found}


def _sweep(options: argparse.Namespace, console: Console) -> None:
    with prefixing("--sweep "):
        grid = parse_grid(options.sweep, {name: kind for name, (_, kind) in swept_flags().items()})
    grid_points = points(grid)
    rows: list[dict[str, Any]] = [dict(point) for point in grid_points]
    arguments = [with_values(options, point) for point in grid_points]
    with console.bar(total=len(rows), desc="points", unit="point") as bar:
        for index, found in run_in_processes(simulate_point, arguments, options.jobs or os.cpu_count() or 1):
            rows[index] |= found
            bar.update()
    print(html_report.sweep_table(rows, list(grid)))
    if all("error" in row for row in rows):
        raise ValueError(f"--sweep: no point can be simulated; the first: {rows[0]['error']}")
    if options.json is not None:
        options.json.write_text(json.dumps({"sweep": rows}) + "\n", encoding="utf-8")
    if options.plot is not None:
        plots.write_drawing(lambda: plots.draw_sweep(rows, list(grid)), options.plot)
    if options.out is not None:
        html_report.write_sweep(rows, list(grid), options.out)
        print_where(options.out)
