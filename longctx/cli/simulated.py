"""Deployments and workloads made from the flags of `longctx simulate`. Nothing here imports JAX."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from longctx.cli import command_flags, command_parser
from longctx.cli.flags import check_options, flag, naming, prefixing, refuse
from longctx.cli.settings import ENGINE_FLAGS, engine_config, given_topology, parallel_plan
from longctx.cli.workload import check_workload, keep_fitting, read_requests, tokenise
from longctx.cluster.config import read_cluster
from longctx.models.config import LlamaConfig
from longctx.parallel.topology import AXES, Topology
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.file import read_profile
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.scheduler.slo import Slo
from longctx.serving.validation import field_types
from longctx.simulation.cluster.settings import Change, ClusterSettings
from longctx.simulation.deployment import ClusterDeployment, Deployment
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, closed_loop, jitter_arrivals, make_mix

_NOT_OF_CLUSTERS = ("preset", "profile", "instances", "baseline", "capacity", "sweep", "jobs", "trace")
_CLUSTER_SETTINGS = tuple(each.name for each in dataclasses.fields(ClusterSettings))
MAX_DEVICES = 65_536  # that are simulated: each instance has pages and a scheduler of its own, in memory


def named_model(text: str) -> LlamaConfig:
    """A model by its name, or that of a folder's `config.json`.

    Raises:
      ValueError: there is neither such a model nor such a folder, or the file is no configuration.
    """
    if text in MODELS:
        return MODELS[text]
    path = Path(text)
    if (path / "config.json").is_file():
        with prefixing("--model: "):
            return LlamaConfig.from_hf(path / "config.json")
    raise ValueError(f"--model must be one of {', '.join(MODELS)}, or a folder with config.json, got {text!r}")


def make_deployment(options: argparse.Namespace, longest: int | None = None) -> Deployment:
    """The engines to simulate; errors name flags.

    Args:
      longest: tokens of the longest request; None: as long as the model takes.
    """
    model = named_model(options.model)
    topology = given_topology(options)
    assert topology is not None
    plan = parallel_plan(options)
    _check_devices("--instances", options.instances * plan.num_devices)
    config = engine_config(options, max_length=longest)
    names = {f"plan's {axis}": flag(axis) for axis in AXES}
    names |= {"instances must": "--instances must", "baseline": "--baseline"}
    with naming(names), naming(ENGINE_FLAGS):
        measured = None if options.profile is None else _read_profile(options.profile, model, config, plan)
        return Deployment(model, topology, plan, config, options.instances, measured, options.baseline)


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
        with naming({"mix": "--mix"}):
            requests = make_mix(options.mix, 1000 if options.requests is None else options.requests, options.seed)
        if options.rate is not None:
            requests = arrive_at_rate(requests, options.rate, options.seed)
    if any(request.prompt is not None for request in requests):
        if not Path(options.model).is_dir():
            raise ValueError("--workload has prompts, whose tokens --model must tell: a folder with a tokenizer")
        requests = tokenise(requests, Path(options.model), model.vocab_size)
    requests, num_skipped = keep_fitting(requests, options, model.max_positions)
    if options.users is not None:
        with naming({"users": "--users", "requests": "--users: requests"}):
            requests = closed_loop(requests, options.users)
    if options.jitter is not None:
        requests = jitter_arrivals(requests, options.jitter, options.seed)
    return requests, num_skipped


def check_simulation(options: argparse.Namespace) -> None:
    """Check that flags suit each other; ValueError names them."""
    check_options(options)  # those of a sweep's point, too
    if options.mix is not None:
        names = ("workload", "prompt_tokens", "output_tokens", "shared_prefix", "limit", "scale_lengths")
        refuse(options, names, "contradicts --mix")
    check_workload(options)
    if options.baseline is not None:
        refuse(options, ("profile",), "contradicts --baseline: systems are compared on predicted devices")
    if options.users is not None:
        refuse(options, ("rate", "jitter"), "contradicts --users: users wait for answers")


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
    with prefixing("--cluster: [simulation] "):
        found = dict(file.simulation)
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


def _change(fields: dict[str, Any]) -> Change:
    if missing := {"at", "instance", "action"} - fields.keys():
        raise ValueError(f"changes must have {', '.join(sorted(missing))}")
    return Change(**fields)
