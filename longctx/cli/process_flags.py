"""What commands make from the flags of several processes (`arguments.processes`)."""

import argparse

from jax.sharding import Mesh

from longctx.cli.arguments.engine import flag
from longctx.cli.engine_flags import make_cpu_devices, naming_flags, plan_mesh
from longctx.cli.files import read_text
from longctx.cli.terminal import Console, interrupts
from longctx.models import checkpoint_fingerprint
from longctx.serving import ParallelPlan
from longctx.serving.distributed import ProcessGroup, describe_mesh, initialize, make_process_mesh

_NAMES = ("coordinator", "num_processes", "process_id", "failure_timeout", "join_timeout")


def initialize_processes(options: argparse.Namespace) -> ProcessGroup:
    """Join the process group that the flags describe; without flags, a group of this process only."""
    if options.coordinator is None:
        given = [
            flag(name)
            for name in ("num_processes", "process_id", "group_secret_file")
            if getattr(options, name) is not None
        ]
        if given:
            raise ValueError(f"{' and '.join(given)} must come with --coordinator")
        return ProcessGroup.alone()
    arguments = {name: getattr(options, name) for name in _NAMES}
    if options.ports is not None:
        low, _, high = options.ports.partition(":")
        if not (low.isdecimal() and high.isdecimal()):
            raise ValueError(f"--ports must be LOW:HIGH, got {options.ports!r}")
        arguments["ports"] = int(low), int(high)
    if options.group_secret_file is not None:
        arguments["group_secret"] = read_text("--group-secret-file", options.group_secret_file)
    interrupts.leave_to_python()  # the other processes are told
    with naming_flags((*_NAMES, "ports")):
        return initialize(**arguments)


def make_parameter_mesh(
    options: argparse.Namespace, plan: ParallelPlan, group: ProcessGroup, console: Console
) -> Mesh | None:
    """Make the mesh that the parameters of `options.model` are sharded over; process 0 prints it.

    None: one device.
    """
    if group.num_processes == 1:
        return plan_mesh(plan)
    group.agree("checkpoint", checkpoint_fingerprint(options.model))
    if plan.num_devices % group.num_processes:
        raise ValueError(
            f"--num-processes must divide the {plan.num_devices} devices of --stage, --context and --tensor, "
            f"got {group.num_processes}"
        )
    make_cpu_devices(plan.num_devices // group.num_processes)
    mesh = make_process_mesh(group, plan.stage, plan.context, plan.tensor)
    if group.is_first:
        console.note(describe_mesh(mesh, group))
    return mesh
