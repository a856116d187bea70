"""Flags of commands that several processes run together, and what commands make from them."""

import argparse
import sys

from jax.sharding import Mesh

from longctx.cli.engine_flags import flag, make_cpu_devices, naming_flags, plan_mesh
from longctx.models import checkpoint_fingerprint
from longctx.serving import ParallelPlan
from longctx.serving.distributed import ProcessGroup, describe_mesh, initialize, make_process_mesh

_NAMES = ("coordinator", "num_processes", "process_id", "failure_timeout", "join_timeout")


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes", "start each with the same command; process 0 prints the results")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help='where process 0 listens; "auto": found from Slurm, Open MPI or Kubernetes',
    )
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I", help="id of this process, from 0")
    group.add_argument(
        "--failure-timeout",
        type=float,
        default=30.0,
        metavar="X",
        help="seconds until a lost process is noticed; default: 30",
    )
    group.add_argument("--ports", metavar="LOW:HIGH", help="further ports that process 0 may listen on; default: any")
    group.add_argument(
        "--join-timeout",
        type=float,
        default=120.0,
        metavar="X",
        help="seconds for which processes wait for each other; default: 120",
    )


def initialize_processes(options: argparse.Namespace) -> ProcessGroup:
    """Join the process group that the flags describe; without flags, a group of this process only."""
    if options.coordinator is None:
        given = [flag(name) for name in ("num_processes", "process_id") if getattr(options, name) is not None]
        if given:
            raise ValueError(f"{' and '.join(given)} must come with --coordinator")
        return ProcessGroup.alone()
    arguments = {name: getattr(options, name) for name in _NAMES}
    if options.ports is not None:
        low, _, high = options.ports.partition(":")
        if not (low.isdecimal() and high.isdecimal()):
            raise ValueError(f"--ports must be LOW:HIGH, got {options.ports!r}")
        arguments["ports"] = int(low), int(high)
    with naming_flags((*_NAMES, "ports")):
        try:
            return initialize(**arguments)
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from None


def make_parameter_mesh(options: argparse.Namespace, plan: ParallelPlan, group: ProcessGroup) -> Mesh | None:
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
        print(describe_mesh(mesh, group), file=sys.stderr)
    return mesh
