"""Flags of commands that several processes run together."""

import argparse
from pathlib import Path


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes", "start each with the same command; process 0 prints the results")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help='where process 0 listens; "auto": found from Slurm, Open MPI or Kubernetes',
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="processes in all")
    group.add_argument("--process-id", type=int, metavar="I", help="id of this process, from 0")
    group.add_argument(
        "--failure-timeout",
        type=float,
        default=30.0,
        metavar="X",
        help="seconds until a lost process is noticed; default: 30",
    )
    group.add_argument(
        "--ports", metavar="LOW:HIGH", help="of which process 0 listens on one beside the coordinator's; default: any"
    )
    group.add_argument(
        "--group-secret-file",
        type=Path,
        metavar="FILE",
        help="from `longctx group-secret`: only who has it can join or listen; default: LONGCTX_GROUP_SECRET",
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        default=120.0,
        metavar="X",
        help="seconds for which processes wait for each other; default: 120",
    )
