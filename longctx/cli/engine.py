"""Engines made from flags: processes, mesh, memory, weights, compilation, and the progress of their steps."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from longctx.cli.files import read_text
from longctx.cli.flags import refuse
from longctx.cli.settings import given_topology, parallel_plan
from longctx.cli.terminal import Console, interrupts
from longctx.kernels import explain
from longctx.models import Llama, checkpoint_fingerprint, load_checkpoint, resolve_model
from longctx.models.checkpoint import read_model
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, Event, Output, ParallelPlan
from longctx.serving.distributed import ProcessGroup, describe_mesh, initialize, make_process_mesh
from longctx.serving.engine.memory import default_pages, estimate
from longctx.serving.executor.interface import Progress
from longctx.serving.predictor.file import load_profile
from longctx.serving.profiler import subject
from longctx.serving.runner.device_memory import ADVICE, in_units

MAX_DEVICES = 1024  # that JAX makes of a CPU within seconds
_PROCESSES = ("coordinator", "num_processes", "process_id", "failure_timeout", "join_timeout")


def initialize_processes(options: argparse.Namespace) -> ProcessGroup:
    """Join the process group that the flags describe; without flags, a group of this process only."""
    if options.coordinator is None:
        refuse(options, ("num_processes", "process_id", "group_secret_file"), "needs --coordinator")
        return ProcessGroup.alone()
    arguments = {name: getattr(options, name) for name in _PROCESSES}
    if options.ports is not None:
        low, _, high = options.ports.partition(":")
        if not (low.isdecimal() and high.isdecimal()):
            raise ValueError(f"--ports must be LOW:HIGH, got {options.ports!r}")
        arguments["ports"] = int(low), int(high)
    if options.group_secret_file is not None:
        arguments["group_secret"] = read_text("--group-secret-file", options.group_secret_file, is_secret=True)
    interrupts.leave_to_python()  # the other processes are told
    return initialize(**arguments)


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
    advice: Mapping[str, str] = ADVICE,
    least_pages: int = 1,
) -> int:
    """Check, before weights are loaded, that an engine fits into memory, and print the estimate.

    The result is the number of pages on each context rank.
    """
    plan.check(model.config, jax.device_count())
    mesh = mesh or make_mesh()
    max_length = config.longest_sequence(model.config.max_positions)
    num_pages = config.num_pages
    if num_pages is None:
        estimate(model, config, mesh, dtype, 1, max_length, plan=plan).check(advice=advice)
        num_pages = default_pages(model, config, mesh, dtype, max_length, plan)
    if num_pages * plan.context < least_pages:
        got = num_pages * plan.context
        raise ValueError(f"num_pages must be at least {least_pages} for the longest request, got {got}")
    use = estimate(model, config, mesh, dtype, num_pages, max_length, plan=plan)
    use.check(advice=advice)
    about = "" if config.num_pages or mesh.local_devices[0].platform == "cpu" else " by estimation"
    console.note(f"memory   {in_units(use.total)} of {in_units(use.device.limit)}{about}: {use.summary}")
    return num_pages


def describe_kernels(model: Llama, config: EngineConfig, dtype: np.dtype[Any]) -> str:
    """Describe, in a line, which implementation of attention the steps take, and why not another."""
    heads, kv_heads, size = model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
    q = jax.ShapeDtypeStruct((1, heads, size), dtype)
    pages = jax.ShapeDtypeStruct((1, config.page_size, kv_heads, size), config.kv_dtype or dtype)
    found = explain(q, pages, paged=True)
    refused = found.refused.get("mosaic_gpu")
    reason = f"mosaic_gpu {refused}" if refused else f"ptxas {found.ptxas}"
    return f"kernels  {found.taken} on {jax.devices()[0].device_kind}: {reason}"


class EngineLoader:
    """Model that a command's flags name, and what its engine is made of; no weights are read before `load`.

    Attributes:
      console: of this process.
      path: of the checkpoint. model, dtype: as its headers have them.
      plan, mesh: of the devices; mesh None: one device.
      subject: what the engine's times depend on, once it is loaded.
    """

    def __init__(
        self, options: argparse.Namespace, group: ProcessGroup | None = None, model: str | Path | None = None
    ) -> None:
        self._options, self._group = options, group or ProcessGroup.alone()
        self.console = Console(options.quiet or not self._group.is_first)
        self.path = resolve_model(options.model if model is None else model, options.quiet)
        self.model, self.dtype = read_model(self.path, getattr(options, "dtype", None))
        self.plan = parallel_plan(options) if ParallelPlan in options.fields else ParallelPlan()

    @cached_property
    def mesh(self) -> Mesh | None:
        """Return the mesh that the parameters are sharded over; process 0 prints that of several processes."""
        plan, group = self.plan, self._group
        if group.num_processes == 1:
            if plan.num_devices == 1:
                return None
            make_cpu_devices(plan.num_devices)
            return make_mesh(plan.stage, plan.context, plan.tensor)
        group.agree("checkpoint", checkpoint_fingerprint(self.path))
        if plan.num_devices % group.num_processes:
            raise ValueError(
                f"--num-processes must divide the {plan.num_devices} devices of --stage, --context and --tensor, "
                f"got {group.num_processes}"
            )
        make_cpu_devices(plan.num_devices // group.num_processes)
        mesh = make_process_mesh(group, plan.stage, plan.context, plan.tensor)
        self.console.note(describe_mesh(mesh, group))
        return mesh

    def check_memory(self, config: EngineConfig, advice: Mapping[str, str] = ADVICE, least_pages: int = 1) -> int:
        """Check that an engine fits into memory, as `check_memory` does; returns its pages on each context rank."""
        return check_memory(self.console, self.model, config, self.plan, self.mesh, self.dtype, advice, least_pages)

    def load(self, config: EngineConfig, **more: Any) -> Engine:
        """Load the weights, and make the engine, with the topology and `--profile` of the flags; prints the kernels."""
        model, params = load_checkpoint(self.path, self.mesh, self.dtype, ffn=self.plan.ffn)
        self.console.note(describe_kernels(model, config, self.dtype))
        self.subject, predictor = subject(model, params, config, self.plan), None
        if getattr(self._options, "profile", None) is not None:
            predictor = load_profile(self._options.profile, self.subject)
        more |= {"predictor": predictor, "plan": self.plan, "topology": given_topology(self._options)}
        return Engine(model, params, config, self.mesh, process_group=self._group, **more)


def show_compiling(compile_steps: Callable[[Progress], None], console: Console, engine: Engine | None = None) -> float:
    """Call an engine's `compile` or `warm_up` and show a bar that counts programs; returns the seconds that it took."""
    start = time.perf_counter()
    if not console.has_bars:  # in a log, minutes of silence look like a hang
        console.note("compiling")
    with console.progress("compiling", "program") as show:
        compile_steps(show)
    seconds = time.perf_counter() - start
    console.note(f"compiled in {seconds:.1f} s")
    if engine is not None and engine.memory is not None:
        console.note(f"memory\n{engine.memory}")
    return seconds


def steps(engine: Engine, request_id: str, console: Console) -> Iterator[list[Event]]:
    """Run an engine until it has no work, and yield the events of each step.

    A bar on standard error shows how much of this request's prompt has been prefilled; it closes with the request's
    first event.
    """
    done, total = engine.requests[request_id].progress
    with console.bar(total=total, initial=done, desc="reading", unit="tok") as bar:
        is_read = False
        while not is_read:
            events = engine.step()
            is_read = any(event.request_id == request_id for event in events)
            # Plans run ahead of results, so the prompt counts as prefilled only when its first token has come.
            read = total if is_read else min(engine.requests[request_id].progress[0], total - 1)
            bar.update(read - done)
            done = read
            if is_read:
                bar.close()
            yield events
    while engine.has_work:
        yield engine.step()


def decode_rate(outputs: Iterable[Output]) -> str:
    """Tokens per second of outputs generated in one batch, the first token of each not counted."""
    outputs = [output for output in outputs if output.metrics.output_tokens > 1]
    if not outputs:
        return "-"
    tokens = sum(output.metrics.output_tokens - 1 for output in outputs)
    seconds = max(o.metrics.finished or 0 for o in outputs) - min(o.metrics.first_token or 0 for o in outputs)
    return f"{tokens / max(seconds, 1e-9):,.1f} tokens/s"
