"""Flags of `longctx bench`."""

import argparse
from pathlib import Path

from longctx.cli.arguments.engine import (
    add_compile_arguments,
    add_engine_arguments,
    add_model_arguments,
    add_plan_arguments,
    add_scheduling_arguments,
)
from longctx.cli.arguments.processes import add_process_arguments
from longctx.cli.arguments.workload import add_workload_arguments

SUMMARY = "Serve a workload, from a file or synthetic, and measure TTFT, TPOT and tokens per second."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random lengths, arrivals and tokens")
    add_workload_arguments(parser)
    add_compile_arguments(parser)
    add_engine_arguments(parser)
    add_plan_arguments(parser)
    add_process_arguments(parser)
    add_scheduling_arguments(parser)

    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, metavar="FILE", help="all figures, every request and step")
    results.add_argument("--plot", type=Path, metavar="FILE", help=".png or .svg: TTFT, TPOT, requests over time")
