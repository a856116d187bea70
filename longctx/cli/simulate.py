"""`longctx simulate`: serve a workload in virtual time, on devices that need not be there."""

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx import extras
from longctx.cli import command_flags, command_parser
from longctx.cli.flags import check_options, flag, prefixing, refuse
from longctx.cli.settings import engine_config, given_topology, parallel_plan
from longctx.cli.terminal import Console
from longctx.cli.workload import (
    check_workload,
    keep_fitting,
    loop_users,
    named_model,
    print_results,
    read_requests,
    tokenise,
    write_json,
)
from longctx.cluster.config import check_keys, prefixed, read_cluster
from longctx.models.config import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.plotting import can_draw
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.file import read_profile
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.scheduler.slo import Slo
from longctx.serving.validation import check_text, field_types
from longctx.simulation.capacity import Capacity, Target, Tried, find_capacity, parse_targets
from longctx.simulation.cluster.settings import Change, ClusterSettings
from longctx.simulation.deployment import ClusterDeployment, Deployment
from longctx.simulation.hardware import saturating_rows
from longctx.simulation.record import Record
from longctx.simulation.reports import chrome_trace, html_report, plots
from longctx.simulation.reports.report import summarize_deployment
from longctx.simulation.reports.stage_trace import StageTrace
from longctx.simulation.sweep import parse_grid, points, run_in_processes
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, jitter_arrivals, make_mix

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SPAN = 20  # times a target's seconds, for which arrivals have to last until a queue that grows is seen


_NOT_OF_CLUSTERS = ("preset", "profile", "instances", "baseline", "capacity", "sweep", "jobs", "trace")
_CLUSTER_SETTINGS = tuple(each.name for each in dataclasses.fields(ClusterSettings) if each.name != "router")
_CLUSTER_KEYS = {*_CLUSTER_SETTINGS, *field_types(ParallelPlan), *field_types(ClusterDeployment)}
_CLUSTER_KEYS -= {"plan", "prefill", "decode", "coupled", "config", "settings", "names"}
MAX_DEVICES = 65_536  # that are simulated: each instance has pages and a scheduler of its own, in memory


def run(options: argparse.Namespace) -> int:
    """Simulate, print tables, and write the files that flags name."""
    if options.cluster is not None:
        check_cluster_flags(options)
    check_simulation(options)
    if options.capacity is not None:
        _targets(options)
        why = "contradicts --capacity: it searches a rate for all requests"
        refuse(options, ("rate", "users", "window"), why)
    if options.sweep is not None:
        refuse(options, ("trace",), "contradicts --sweep: it is of one simulation")
    elif options.baseline is not None:
        why = "contradicts --baseline: it has no trace of stages and pages"
        refuse(options, ("plot", "trace", "out"), why)
    console = Console(options.quiet)
    if options.sweep is not None:
        _sweep(options, console)
    else:
        _simulate(options, console)
    return 0


def _targets(options: argparse.Namespace) -> list[Target]:
    with prefixing("--capacity "):
        return parse_targets(options.capacity)


def _make(options: argparse.Namespace) -> tuple[Deployment, list[WorkloadRequest], int]:
    requests, num_skipped = make_requests(options, named_model(options.model))
    return make_deployment(options, max(request.length for request in requests)), requests, num_skipped


def _simulate(options: argparse.Namespace, console: Console) -> None:
    deployment: Deployment | ClusterDeployment
    if options.cluster is None:
        deployment, requests, num_skipped = _make(options)
    else:
        deployment = make_cluster(options)
        requests, num_skipped = make_requests(options, deployment.model)
    found: dict[str, Any] = {}
    if options.capacity is not None:
        assert isinstance(deployment, Deployment)
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
    if isinstance(deployment, Deployment):
        simulation = deployment.simulation(traces, keep_ticks=options.trace is not None)
    else:
        simulation = deployment.simulation()
    keeps_steps = options.json is not None and options.cluster is None
    with console.bar(total=len(requests), desc="requests", unit="req") as bar:

        def show(record: Record) -> None:  # what `update` returns would end the run
            bar.set_postfix_str(f"{simulation.loop.now:,.0f} s simulated", refresh=False)
            bar.update(len(record.served) + len(record.rejected) - bar.n)

        record = simulation.run(requests, options.seed, _until(options), show, keeps_steps)
    summary = summarize_deployment(record, deployment) | {"skipped": num_skipped} | found
    contents = write_json(options, _settings(options, deployment), record, summary)

    def draw() -> "Figure":
        if isinstance(deployment, Deployment):
            return plots.draw_deployment(record, traces or [])
        return plots.draw_cluster(record, deployment.config.ttft, deployment.config.tpot)

    if isinstance(deployment, Deployment) and _follows_hardware(options):
        rows = deployment.config.token_budget
        print(f"budget   {rows:,} rows a step: the smallest that saturates the devices (--token-budget)\n")
    table = print_results(options, summary, draw)
    if options.out is not None:
        html_report.write_report(contents, record, table, plots.write_drawings(draw, options.out), options.out)
        _print_where(options.out)
    if options.trace is not None:
        chrome_trace.write_chrome_trace(record, traces or [], options.trace)


def _until(options: argparse.Namespace) -> float:
    return math.inf if options.window is None else options.window


def _settings(options: argparse.Namespace, deployment: Deployment | ClusterDeployment) -> dict[str, Any]:
    """Return what was simulated, as plain data."""
    found = {"model": options.model, "topology": deployment.topology.to_dict()}
    if isinstance(deployment, ClusterDeployment):
        rest = {"cluster": dataclasses.asdict(deployment)}
        del rest["cluster"]["model"], rest["cluster"]["topology"]
        return found | rest
    config = dataclasses.asdict(deployment.config) | {"num_pages": deployment.num_pages}
    del config["hash_key"]
    plan = dataclasses.asdict(deployment.plan)
    return found | {"plan": plan, "instances": deployment.instances, "config": config}


def _print_where(out: Path) -> None:
    """Print where the report of `--out` is, and how to install what would draw in it, if that is missing."""
    lacking = "" if can_draw() else f", without drawings: {extras.pip_line('plot')}"
    print(f"written to {out / 'report.html'}{lacking}")


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
        record = deployment.simulation().run(requests, options.seed, _until(options), keep_steps=False)
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
        _print_where(options.out)


# Deployments and workloads of flags.


def make_deployment(options: argparse.Namespace, longest: int | None = None) -> Deployment:
    """The engines to simulate; errors name flags."""
    model = named_model(options.model)
    topology = given_topology(options)
    assert topology is not None
    plan = parallel_plan(options)
    _check_devices("--instances", options.instances * plan.num_devices)
    rows = _token_budget(options, model, topology, plan)
    config = engine_config(options, max_length=longest, token_budget=rows)
    measured = None if options.profile is None else _read_profile(options.profile, model, config, plan)
    return Deployment(model, topology, plan, config, options.instances, measured, options.baseline)


def _follows_hardware(options: argparse.Namespace) -> bool:
    """Whether nothing that is given says how many rows a step has."""
    names = ("token_budget", "buckets", "preset", "profile", "baseline")
    return all(getattr(options, name) is None for name in names)


def _token_budget(options: argparse.Namespace, model: LlamaConfig, topology: Topology, plan: ParallelPlan) -> int:
    """Return the rows of a step at most: as given, of a profiled engine, or as many as saturate the devices."""
    if options.token_budget is not None:
        return int(options.token_budget)
    if options.buckets is not None:
        return max(options.buckets)
    if _follows_hardware(options):
        return max(options.max_running, saturating_rows(model, topology, plan, options.kv_dtype))
    if options.profile is not None:
        return int(max(read_profile(options.profile)[1].get("buckets", (EngineConfig.token_budget,))))
    return EngineConfig.token_budget  # a preset has it if it gives no other; a baseline has its own


def _read_profile(path: Path, model: LlamaConfig, config: EngineConfig, plan: ParallelPlan) -> Predictor:
    """The predictor of a profile; ValueError if it was measured on another engine, whatever its devices were."""
    predictor, subject = read_profile(path)
    given = dataclasses.asdict(model) | dataclasses.asdict(config) | {"buckets": list(config.row_buckets)}
    sizes = dataclasses.asdict(plan) if plan.num_devices > 1 else None
    for name, value in ({"kv_dtype": None} | subject).items():
        if name == "plan":
            there, here = value, None if sizes is None else {axis: sizes[axis] for axis in value}
        else:
            there, here = value, given.get(name, value)
        if there != here:
            raise ValueError(f"--profile: {path} was measured on another engine: {name} is {there} there, {here} here")
    if sizes is not None and "plan" not in subject:
        raise ValueError(f"--profile: {path} was measured on one device")
    return predictor


def make_requests(options: argparse.Namespace, model: LlamaConfig) -> tuple[list[WorkloadRequest], int]:
    """The requests to simulate, in order of arrival, and how many `--max-length` leaves out; errors name flags."""
    if options.mix is None:
        requests = read_requests(options)
    else:
        requests = make_mix(options.mix, 1000 if options.requests is None else options.requests, options.seed)
        if options.rate is not None:
            requests = arrive_at_rate(requests, options.rate, options.seed)
    if any(request.prompt is not None for request in requests):
        if not Path(options.model).is_dir():
            raise ValueError("--workload has prompts, whose tokens --model must tell: a folder with a tokenizer")
        requests = tokenise(requests, Path(options.model), model.vocab_size)
    requests, num_skipped = keep_fitting(requests, options, model.max_positions)
    requests = loop_users(requests, options)
    if options.jitter is not None:
        requests = jitter_arrivals(requests, options.jitter, options.seed)
    return requests, num_skipped


def check_simulation(options: argparse.Namespace) -> None:
    """Check that flags suit each other; ValueError names them."""
    check_options(options)  # those of a sweep's point, too
    if options.mix is not None:
        names = ("workload", "agents", "prompt_tokens", "output_tokens", "shared_prefix", "limit", "scale_lengths")
        refuse(options, names, "contradicts --mix")
    check_workload(options)
    if options.baseline is not None:
        refuse(options, ("profile",), "contradicts --baseline: systems are compared on predicted devices")


def swept_flags() -> dict[str, tuple[str, type]]:
    """Return what `--sweep` can vary: by the names of flags, their places among the options and the types of values."""
    return {
        option.removeprefix("--").replace("-", "_"): (
            action.dest,
            int if action.type is int else float if action.type is float else str,
        )
        for action in command_flags("simulate")
        for option in action.option_strings
        if action.nargs != 0 and action.type in (None, int, float)
    }


def with_values(options: argparse.Namespace, values: dict[str, Any]) -> argparse.Namespace:
    """Return options as if flags had these values."""
    flags = swept_flags()
    return argparse.Namespace(**vars(options) | {flags[name][0]: value for name, value in values.items()})


def check_cluster_flags(options: argparse.Namespace) -> None:
    """Check that no flag says what the file of `--cluster` says; ValueError names it."""
    usual = command_parser("simulate").parse_args([])
    fixed = [each.name for settings in (EngineConfig, Slo) for each in options.fields[settings].values()]
    for name in (*fixed, *_NOT_OF_CLUSTERS):
        if getattr(options, name) != getattr(usual, name):
            raise ValueError(f"{flag(name)} contradicts --cluster, whose file says what the instances are")


def make_cluster(options: argparse.Namespace) -> ClusterDeployment:
    """The cluster of a file; flags say what it leaves open. ValueError names a key of the file, or a flag."""
    with prefixing("--cluster: "):
        file = read_cluster(options.cluster)
    with prefixed("--cluster: [simulation] "):
        found = dict(file.simulation)
        check_keys("", found, _CLUSTER_KEYS)
        for name in ("model", "topology"):
            check_text(name, found.get(name, ""))
        axes = {name: found.pop(name) for name in field_types(ParallelPlan) if name in found}
        options.model = found.pop("model", options.model)
        model = named_model(options.model)
        topology = Topology.named(found.pop("topology", options.topology))
        changes = tuple(_change(each) for each in found.pop("changes", ()))
        settings: dict[str, Any] = {"report_seconds": file.report_seconds}
        settings |= {name: found.pop(name) for name in _CLUSTER_SETTINGS if name in found}
        entries = sorted(file.instances, key=lambda each: ("prefill", "decode", "both").index(each.role))
        names = tuple(each.name for each in entries)
        for change in changes:
            if change.instance not in names:
                raise ValueError(f"changes must name instances, {', '.join(names)}; got {change.instance!r}")
        plan = ParallelPlan(**axes) if axes else parallel_plan(options)
        _check_devices("instances", len(names) * plan.num_devices)
        return ClusterDeployment(
            model=model,
            topology=topology,
            plan=plan,
            prefill=file.count("prefill"),
            decode=file.count("decode"),
            coupled=file.count("both"),
            config=file.conductor,
            settings=ClusterSettings(**settings),
            names=names,
            changes=changes,
            **found,
        )


def _check_devices(name: str, count: int) -> None:
    if count > MAX_DEVICES:
        raise ValueError(f"{name} must have at most {MAX_DEVICES:,} devices together, got {count:,}")


def _change(fields: Any) -> Change:
    check_keys("changes: ", fields, ("at", "instance", "action"))
    if missing := {"at", "instance", "action"} - fields.keys():
        raise ValueError(f"changes must have {', '.join(sorted(missing))}")
    return Change(**fields)
