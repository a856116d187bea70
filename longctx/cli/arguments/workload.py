"""Flags of a workload."""

import argparse
from pathlib import Path


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    workload = parser.add_argument_group("workload")
    workload.add_argument("--workload", type=Path, metavar="FILE", help="trace (JSON lines, or CSV of lengths)")
    workload.add_argument("--limit", type=int, metavar="N", help="only the first N requests of the file")
    workload.add_argument("--scale-lengths", type=float, metavar="X", help="all lengths of the file times X")
    workload.add_argument(
        "--requests", type=int, metavar="N", help="generate N requests instead of reading a file (16)"
    )
    workload.add_argument("--prompt-tokens", metavar="DIST", help="N, LOW:HIGH or LOW:HIGH:log (64:512)")
    workload.add_argument("--output-tokens", metavar="DIST", help="likewise (16:64)")
    workload.add_argument("--shared-prefix", type=int, metavar="N", help="further tokens that all prompts begin with")
    workload.add_argument("--rate", type=float, metavar="R", help="requests a second, Poisson; inf: all at once")
    workload.add_argument("--max-length", type=int, metavar="N", help="skip longer requests (prompt and output)")
