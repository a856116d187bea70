"""The flags of a command that many processes run together."""

import argparse
import sys

from jax.sharding import Mesh

from longctx.cli.engine_flags import flag, make_cpu_devices, naming_flags, plan_mesh
from longctx.models import checkpoint_fingerprint
from longctx.serving import ParallelPlan
from longctx.serving.distributed import ProcessGroup, describe_mesh, initialize, make_process_mesh

_NAMES = ("coordinator", "num_processes", "process_id", "failure_timeout", "join_timeout")


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes", "each is started with the same command; the first one prints")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help='where the first one listens; "auto": as Slurm or the like say'
    )
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I", help="of this one, from 0")
    group.add_argument(
        "--failure-timeout",
        type=float,
        default=30.0,
        metavar="X",
        help="seconds to notice that one is gone; default: 30",
    )
    group.add_argument("--ports", metavar="LOW:HIGH", help="where the first one may listen besides; default: any")
    group.add_argument(
        "--join-timeout", type=float, default=120.0, metavar="X", help="seconds to wait for each other; default: 120"
    )


def join(options: argparse.Namespace) -> ProcessGroup:
    """This process among those that the flags tell of; alone, if they tell of none."""
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


def spread(options: argparse.Namespace, plan: ParallelPlan, group: ProcessGroup) -> Mesh | None:
    """Where the parameters of `options.model` go, in all processes; the first one shows it."""
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
