"""`longctx simulate --cluster`: serve a workload on a cluster in virtual time, placed by the conductor that serves."""

import argparse
import dataclasses
import math
from typing import Any

from longctx.cli import command_parser
from longctx.cli.files import check_input
from longctx.cli.flags import flag, prefixing
from longctx.cli.settings import parallel_plan
from longctx.cli.simulated import MAX_DEVICES, apply_plan, check_simulation, make_requests, named_model
from longctx.cli.terminal import Console
from longctx.cli.workload import check_folder, check_outputs, write_results
from longctx.cluster.config import ClusterFile, check_keys, prefixed, read_cluster
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.scheduler.slo import Slo
from longctx.serving.validation import check_text
from longctx.simulation.cluster.settings import Change, ClusterSettings
from longctx.simulation.deployment import ClusterDeployment
from longctx.simulation.record import Record
from longctx.simulation.reports import plots
from longctx.simulation.reports.report import summarize_deployment

_REFUSED = ("preset", "profile", "instances", "baseline", "capacity", "sweep", "jobs", "trace")
_SETTINGS = tuple(each.name for each in dataclasses.fields(ClusterSettings))
_FOR_COMMAND = ("model", "topology", "plan", "changes")  # of [simulation]; all others are fields of a deployment
_KEYS = {*_SETTINGS, *_FOR_COMMAND, *(each.name for each in dataclasses.fields(ClusterDeployment))}
_KEYS -= {"prefill", "decode", "coupled", "config", "settings", "names"}


def run_cluster(options: argparse.Namespace) -> None:
    """Simulate, and write what flags ask for.

    Raises:
      ValueError: a flag or a key of the file can't be; the message names it.
    """
    _check(options)
    console = Console(options.quiet)
    with prefixing("--cluster: "):
        file = read_cluster(options.cluster)
        deployment = _deployment(file, options)
    requests, num_skipped = make_requests(options, deployment.model)
    until = math.inf if options.window is None else options.window
    with console.bar(total=len(requests), desc="requests", unit="req") as bar:

        def show(record: Record) -> None:  # what `update` returns would end the run
            bar.update(len(record.served) + len(record.rejected) - bar.n)

        record = deployment.run(requests, options.seed, until, progress=show, keep_steps=False)
    summary = summarize_deployment(record, deployment) | {"skipped": num_skipped}
    settings = {
        "model": file.simulation.get("model", options.model),
        "topology": deployment.topology.to_dict(),
        "cluster": dataclasses.asdict(deployment),
    }
    del settings["cluster"]["model"], settings["cluster"]["topology"]
    slos = deployment.config.ttft, deployment.config.tpot
    write_results(options, settings, record, summary, lambda: plots.draw_cluster(record, *slos))


def _check(options: argparse.Namespace) -> None:
    """Check flags alone."""
    usual = command_parser("simulate").parse_args([])
    refused = [each.name for settings in (EngineConfig, Slo) for each in options.fields[settings].values()]
    for name in (*refused, *_REFUSED):
        if getattr(options, name) != getattr(usual, name):
            raise ValueError(f"{flag(name)} contradicts --cluster, whose file says what the instances are")
    check_input("--cluster", options.cluster)
    check_simulation(options)
    check_outputs(options, "json", "plot")
    check_folder(options)


def _deployment(file: ClusterFile, options: argparse.Namespace) -> ClusterDeployment:
    """The cluster of a file; flags say what it leaves open."""
    found = dict(file.simulation)
    check_keys("[simulation] ", found, _KEYS)
    devices = argparse.Namespace(**vars(options) | {"plan": found.get("plan", options.plan)})
    apply_plan(devices)
    with prefixed("[simulation] "):
        for name in ("model", "topology", "plan"):
            check_text(name, found.get(name, ""))
        sizes = {name: value for name, value in found.items() if name not in _FOR_COMMAND}
        settings: dict[str, Any] = {"report_seconds": file.report_seconds}
        settings |= {name: sizes.pop(name) for name in _SETTINGS if name in sizes}
        entries = sorted(file.instances, key=lambda each: ("prefill", "decode", "both").index(each.role))
        changes = tuple(_change(each) for each in found.get("changes", ()))
        names = tuple(each.name for each in entries)
        for change in changes:
            if change.instance not in names:
                raise ValueError(f"changes must name instances, {', '.join(names)}; got {change.instance!r}")
        deployment = ClusterDeployment(
            model=named_model(found.get("model", options.model)),
            topology=Topology.named(found.get("topology", options.topology)),
            plan=parallel_plan(devices),
            prefill=file.count("prefill"),
            decode=file.count("decode"),
            coupled=file.count("both"),
            config=file.conductor,
            settings=ClusterSettings(**settings),
            names=names,
            changes=changes,
            **sizes,
        )
    if deployment.num_devices > MAX_DEVICES:
        raise ValueError(
            f"instances must have at most {MAX_DEVICES:,} devices together, got {deployment.num_devices:,}"
        )
    return deployment


def _change(fields: Any) -> Change:
    check_keys("changes: ", fields, ("at", "instance", "action"))
    if missing := {"at", "instance", "action"} - fields.keys():
        raise ValueError(f"changes must have {', '.join(sorted(missing))}")
    return Change(**fields)
