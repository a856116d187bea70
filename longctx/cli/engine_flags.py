"""What commands make from the flags of model, engine, devices and scheduling (`arguments.engine`)."""

import argparse
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from longctx.cli.arguments.engine import flag
from longctx.cli.config_flags import engine_config as engine_config
from longctx.cli.config_flags import given_topology as given_topology
from longctx.cli.config_flags import parallel_plan as parallel_plan
from longctx.cli.config_flags import sampling_params as sampling_params
from longctx.cli.naming import naming_flags as naming_flags
from longctx.cli.naming import prefixing as prefixing
from longctx.cli.terminal import Console
from longctx.kernels import explain
from longctx.models import Llama
from longctx.models.params import Params
from longctx.parallel import make_mesh
from longctx.parallel.mesh import AXES
from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.engine.memory import default_pages, estimate, in_units, param_bytes
from longctx.serving.predictor.file import load_profile
from longctx.serving.profiler import subject

MAX_DEVICES = 1024  # that JAX makes of a CPU within seconds
LOWER = {
    "params": "take more devices by --stage or --tensor, or --dtype bfloat16",
    "pages": "lower --num-pages or --page-size; about {fit:,} pages fit",
    "steps": "lower --max-running or --token-budget",
}
"""What to do where memory is short, as `MemoryEstimate.check` takes it."""


def plan_mesh(plan: ParallelPlan) -> Mesh | None:
    """Make the mesh that a checkpoint's parameters are sharded over; None: one device."""
    if plan.num_devices == 1:
        return None
    make_cpu_devices(plan.num_devices)
    with naming_flags(AXES):
        return make_mesh(plan.stage, plan.context, plan.tensor)


def make_cpu_devices(count: int) -> None:
    """Make JAX divide the CPU into as many devices as a plan needs; ValueError if they are too many for a process."""
    if count > MAX_DEVICES:
        raise ValueError(f"--stage * --context * --tensor must be at most {MAX_DEVICES} for a process, got {count}")
    with suppress(RuntimeError):  # JAX has created its devices already, as in tests
        jax.config.update("jax_num_cpu_devices", count)


def check_memory(
    console: Console,
    model: Llama,
    config: EngineConfig,
    plan: ParallelPlan,
    mesh: Mesh | None,
    dtype: np.dtype[Any],
    lower: Mapping[str, str] = LOWER,
    least_pages: int = 1,
) -> int:
    """Check, before weights are loaded, that an engine fits into memory, and print the estimate.

    The result is the number of pages on each context rank.

    Args:
      mesh: as the checkpoint will be loaded; None: one device.
      least_pages: pages of the longest request.

    Raises:
      ValueError: it doesn't fit, or the plan doesn't suit model and devices.
    """
    with naming_flags({"plan's stage": "--stage", "plan's tensor": "--tensor"} | {axis: flag(axis) for axis in AXES}):
        plan.check(model.config, jax.device_count())
    mesh = mesh or make_mesh()
    device, max_length = mesh.local_devices[0], config.longest_sequence(model.config.max_positions)
    with naming_flags():
        num_pages = config.num_pages
        if num_pages is None:
            estimate(model, config, mesh, dtype, 1, max_length).check(device, lower)
            num_pages = default_pages(model, config, mesh, dtype, max_length, param_bytes(model, mesh, dtype))
        if num_pages * plan.context < least_pages:
            got = num_pages * plan.context
            raise ValueError(f"num_pages must be at least {least_pages} for the longest request, got {got}")
        needed = estimate(model, config, mesh, dtype, num_pages, max_length)
        available = needed.check(device, lower)
    there = "" if available is None else f" of {in_units(available)}"
    about = "" if config.num_pages or device.platform == "cpu" else " by estimation"
    console.note(f"memory   {in_units(needed.total)}{there}{about}: {needed}")
    return num_pages


def note_kernels(console: Console, model: Llama, config: EngineConfig, dtype: np.dtype[Any]) -> str:
    """Print which implementation of attention the steps take, and why not another; the line is the result."""
    heads, kv_heads, size = model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
    q = jax.ShapeDtypeStruct((1, heads, size), dtype)
    pages = jax.ShapeDtypeStruct((1, config.page_size, kv_heads, size), config.kv_dtype or dtype)
    found = explain(q, pages, paged=True)
    refused = found.refused.get("mosaic_gpu")
    reason = f"mosaic_gpu {refused}" if refused else f"ptxas {found.ptxas}"
    line = f"kernels  {found.taken} on {jax.devices()[0].device_kind}: {reason}"
    console.note(line)
    return line


def make_engine(options: argparse.Namespace, model: Llama, params: Params, config: EngineConfig, **more: Any) -> Engine:
    """Make an engine from the flags, with the predictor of `--profile` and the plan of the devices' flags."""
    predictor, plan = None, parallel_plan(options) if hasattr(options, "stage") else None
    if getattr(options, "profile", None) is not None:
        predictor = load_profile(options.profile, subject(model, params, config, plan))
    with naming_flags():
        return Engine(model, params, config, predictor=predictor, plan=plan, topology=given_topology(options), **more)
