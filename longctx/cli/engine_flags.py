"""Flags that configure an engine, and what commands make from them."""

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from longctx.models import Llama
from longctx.models.builtin import TINY
from longctx.models.params import Params
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, Slo
from longctx.serving.parallel_plan import EXCHANGES, PLACEMENTS
from longctx.serving.predictor.file import load_profile
from longctx.serving.profiler import subject

_SIZES = ("page_size", "num_pages", "max_running", "token_budget", "run_ahead")
_CHOICES = ("admission", "policy", "chunking", "max_share")
_SLO = ("ttft_factor", "ttft_least", "tpot")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=TINY, metavar="DIR", help="checkpoint; default: the built-in one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's own")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    defaults = EngineConfig()
    for name in _SIZES:
        default = getattr(defaults, name)
        engine.add_argument(
            flag(name), type=int, default=default, metavar="N", help=f"default: {default or 'what fits'}"
        )
    engine.add_argument("--buckets", metavar="N,N", help="numbers of rows of compiled steps; default: doubling from 8")
    engine.add_argument("--admission", choices=["reserve", "optimistic"], default=defaults.admission)
    engine.add_argument("--no-prefix-cache", action="store_true", help="share no pages")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    plan = parser.add_argument_group("devices")
    for name, about in (("stage", "sequence pipeline"), ("context", "ranks with pages"), ("tensor", "heads")):
        plan.add_argument(flag(name), type=int, default=1, metavar="N", help=f"devices along this axis: {about}")
    plan.add_argument("--exchange", choices=EXCHANGES, default="auto", help="exchange across --context; default: auto")
    plan.add_argument(
        "--placement", choices=PLACEMENTS, default="grow", help="placement of pages over --context; default: grow"
    )
    plan.add_argument(
        "--rank-tokens", type=int, metavar="N", help="the most tokens of a request on one rank before it grows"
    )


def add_scheduling_arguments(parser: argparse.ArgumentParser) -> None:
    scheduling = parser.add_argument_group("scheduling")
    defaults, slo = EngineConfig(), Slo()
    scheduling.add_argument("--policy", default=defaults.policy, help="fcfs, edf, srpf, lrs or ilrs (the default)")
    scheduling.add_argument("--chunking", default=defaults.chunking, help="static (the default), static:N or adaptive")
    scheduling.add_argument(
        "--max-share",
        type=float,
        default=defaults.max_share,
        metavar="X",
        help="share of a step for short prompts, ilrs",
    )
    for name, about in zip(
        _SLO,
        ("TTFT target: times the prompt alone", "TTFT target: at least, seconds", "TPOT target, seconds"),
        strict=True,
    ):
        default = getattr(slo, name)
        scheduling.add_argument(
            flag(name), type=float, default=default, metavar="X", help=f"{about}; default: {default}"
        )
    scheduling.add_argument(
        "--profile", type=Path, metavar="FILE", help="profile of this engine, from `longctx profile`"
    )


def engine_config(options: argparse.Namespace, **more: Any) -> EngineConfig:
    """Make the configuration from the flags; errors name the flags."""
    if options.buckets is not None and not re.fullmatch(r"\d+(,\d+)*", options.buckets):
        raise ValueError(f"--buckets must be integers with commas between them, got {options.buckets!r}")
    with naming_flags():
        given = {name: getattr(options, name) for name in (*_SIZES, *_CHOICES) if hasattr(options, name)}
        if hasattr(options, "tpot"):
            given["slo"] = Slo(**{name: getattr(options, name) for name in _SLO})
        if options.buckets is not None:
            given["buckets"] = tuple(map(int, options.buckets.split(",")))
        return EngineConfig(prefix_cache=not options.no_prefix_cache, **given, **more)


def parallel_plan(options: argparse.Namespace) -> ParallelPlan:
    """Make the parallel plan from the flags."""
    return ParallelPlan(**{field.name: getattr(options, field.name) for field in fields(ParallelPlan)})


def plan_mesh(plan: ParallelPlan) -> Mesh | None:
    """Make the mesh that a checkpoint's parameters are sharded over; None: one device."""
    if plan.num_devices == 1:
        return None
    make_cpu_devices(plan.num_devices)
    return make_mesh(plan.stage, plan.context, plan.tensor)


def make_cpu_devices(count: int) -> None:
    """Make JAX divide the CPU into as many devices as a plan needs."""
    with suppress(RuntimeError):  # JAX has created its devices already, as in tests
        jax.config.update("jax_num_cpu_devices", count)


def make_engine(options: argparse.Namespace, model: Llama, params: Params, config: EngineConfig, **more: Any) -> Engine:
    """Make an engine from the flags, with the predictor of `--profile` and the plan of the devices' flags."""
    predictor = None
    if getattr(options, "profile", None) is not None:
        if hasattr(options, "stage") and parallel_plan(options).num_devices > 1:
            raise ValueError(
                "--profile describes an engine on one device: it can't be used with --stage, --context or --tensor"
            )
        predictor = load_profile(options.profile, subject(model, params, config))
    with naming_flags():
        plan = parallel_plan(options) if hasattr(options, "stage") else None
        return Engine(model, params, config, predictor=predictor, plan=plan, **more)


@contextmanager
def naming_flags(arguments: Sequence[str] = (*_SIZES, *_CHOICES, *_SLO, "buckets")) -> Iterator[None]:
    """Replace the engine's argument names by flags in its error messages."""
    names = "|".join(arguments)
    try:
        yield
    except (ValueError, TimeoutError) as error:
        raise type(error)(re.sub(rf"\b({names})\b", lambda name: flag(name[0]), str(error))) from None


def flag(name: str) -> str:
    """The flag of an argument."""
    return f"--{name.replace('_', '-')}"
