"""What commands make from flags without any device: configuration, plan, topology, sampling. It loads no JAX."""

import argparse
import re
from dataclasses import fields
from typing import Any

from longctx.cli.arguments.engine import CHOICES, SIZES, SLO
from longctx.cli.naming import naming_flags
from longctx.parallel.topology import AXES, Topology
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.slo import Slo

_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop")
_TOPOLOGY = {"topology must": "--topology must"}


def engine_config(options: argparse.Namespace, **more: Any) -> EngineConfig:
    """Make the configuration from the flags; errors name the flags."""
    if options.buckets is not None and not re.fullmatch(r"\d+(,\d+)*", options.buckets):
        raise ValueError(f"--buckets must be integers with commas between them, got {options.buckets!r}")
    with naming_flags():
        given = {name: getattr(options, name) for name in (*SIZES, *CHOICES) if hasattr(options, name)}
        if hasattr(options, "tpot"):
            given["slo"] = Slo(**{name: getattr(options, name) for name in SLO})
        if options.buckets is not None:
            given["buckets"] = tuple(map(int, options.buckets.split(",")))
        return EngineConfig(prefix_cache=not options.no_prefix_cache, **given, **more)


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Make the sampling parameters from the flags; errors name the flags."""
    with naming_flags(_SAMPLING):
        return SamplingParams(**{name: getattr(options, name) for name in _SAMPLING if hasattr(options, name)})


def parallel_plan(options: argparse.Namespace) -> ParallelPlan:
    """Make the parallel plan from the flags; errors name the flags."""
    names = [field.name for field in fields(ParallelPlan)]
    with naming_flags(names):
        plan = ParallelPlan(**{name: getattr(options, name) for name in names})
    topology = given_topology(options)
    if topology is not None:  # now, before weights are loaded
        with naming_flags(_TOPOLOGY):
            topology.check(**{axis: getattr(plan, axis) for axis in AXES})
    return plan


def given_topology(options: argparse.Namespace) -> Topology | None:
    """The topology of `--topology`; None: it is to be found."""
    text = getattr(options, "topology", None)
    if text is None:
        return None
    with naming_flags(_TOPOLOGY):
        return Topology.named(text)
